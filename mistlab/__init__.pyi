"""Written by ``make stubs`` from the names of the package."""

from experiments.library.functions import explain as explain
from experiments.library.functions import from_framework as from_framework
from experiments.library.functions import names as names
from experiments.library.functions import predict as predict
from experiments.library.functions import predict_many as predict_many
from experiments.library.functions import predict_runs as predict_runs
from experiments.library.functions import serve as serve
from experiments.library.functions import to_framework as to_framework
from experiments.library.functions import tune as tune
from experiments.library.functions import will_it_fit as will_it_fit
from mistlab.core.values import FieldError as FieldError
from mistlab.core.values import InputError as InputError
from mistlab.core.values import from_mapping as from_mapping
from mistlab.core.values import near_matches as near_matches
from mistlab.core.values import to_mapping as to_mapping
from mistlab.job.job import Job as Job
from mistlab.job.job import dump_job as dump_job
from mistlab.job.job import job_from_mapping as job_from_mapping
from mistlab.job.job import job_to_mapping as job_to_mapping
from mistlab.job.job import load_job as load_job
from mistlab.job.prediction import Environment as Environment
from mistlab.job.prediction import Measurement as Measurement
from mistlab.job.prediction import MemoryByClass as MemoryByClass
from mistlab.job.prediction import MemoryByPhase as MemoryByPhase
from mistlab.job.prediction import Prediction as Prediction
from mistlab.job.prediction import Predictor as Predictor
from mistlab.job.prediction import StageMeasurement as StageMeasurement
from mistlab.job.prediction import StagePrediction as StagePrediction
from mistlab.job.search import Budget as Budget
from mistlab.job.search import Improvement as Improvement
from mistlab.job.search import Problem as Problem
from mistlab.job.search import Searcher as Searcher
from mistlab.job.search import SearchResult as SearchResult
from mistlab.machine.cluster import Cluster as Cluster
from mistlab.machine.hardware import Gpu as Gpu
from mistlab.machine.hardware import Hardware as Hardware
from mistlab.machine.hardware import Node as Node
from mistlab.machine.hardware import PeakTflops as PeakTflops
from mistlab.machine.hardware import Provenance as Provenance
from mistlab.machine.hardware import Source as Source
from mistlab.plan.plan import Offload as Offload
from mistlab.plan.plan import Plan as Plan
from mistlab.plan.plan import StagePlan as StagePlan
from mistlab.plan.space import OffloadRatios as OffloadRatios
from mistlab.plan.space import SearchSpace as SearchSpace
from mistlab.plan.workload import ModelSpec as ModelSpec
from mistlab.plan.workload import Workload as Workload
from mistlab.schedule.slots import Action as Action
from mistlab.stages.stage_batch import StageBatch as StageBatch
from mistlab.stages.stage_batch import StageFigures as StageFigures

__version__: str
NAMES: dict[str, tuple[str, ...]]
