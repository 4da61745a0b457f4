"""A reference for tests: one process answers all requests, one after another, by the whole model,
without caches, batches or other ranks.
"""

from dataclasses import replace

import torch

from mistlab.plan.workload import Workload
from runtime.models.families import model_of
from runtime.models.transformer import Transformer
from runtime.serving.phased_rank import PhasedJob
from runtime.serving.served_weights import Start


def tokens_of_whole(job: PhasedJob) -> list[list[int]]:
    """The tokens that greedy decoding gives each request; for each token the whole sequence is
    computed again.
    """
    model = whole_model(job.workload, job.start)
    answers = []
    with torch.no_grad():
        for prompt, output in zip(job.prompts, job.load.outputs, strict=True):
            sequence = list(prompt)
            for _ in range(output):
                logits = model(torch.tensor([sequence]))
                sequence.append(int(logits[0, -1].argmax()))
            answers.append(sequence[len(prompt) :])
    return answers


def whole_model(workload: Workload, start: Start) -> Transformer:
    """A model on one process, with its initial weights and unfused attention, which all devices
    support.
    """
    model = model_of(replace(workload, attention="math"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start(name, tuple(parameter.shape)))
    return model.eval()
