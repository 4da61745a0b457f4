"""Policy-gradient search: learns by REINFORCE (Williams 1992) which choices make plans fast.

The option of each choice is drawn by the choice's own logits. Learning shifts the logits towards
options of plans that are faster than others in their batch.
"""

from dataclasses import dataclass, field

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.job.search import Problem
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from searchers.methods.scores import Score, Scores
from searchers.savings import Chooser, chosen_plan
from searchers.strategy import Ending, Ledger

TOGETHER = 64
RATE = 0.05
ENTROPY_BONUS = 0.01
# After this many batches without a new plan, a policy has converged. If the next policy finds no
# new plan either, the search space is exhausted.
SETTLED = 5

# A choice that determines a plan: its name, and its number of options.
Choice = tuple[str, int]


def rl(problem: Problem, space: SearchSpace, ledger: Ledger, draw: np.random.Generator) -> Ending:
    """Train policies until the budget is spent; whenever one has converged, start a new one."""
    scores = Scores(ledger=ledger, cluster=problem.cluster)
    while _learn(problem, space, scores, draw):
        scores.repeats = 0
    return Ending()


def _learn(problem: Problem, space: SearchSpace, scores: Scores, draw: np.random.Generator) -> bool:
    """Train a policy until it converges; returns whether it drew any new plan."""
    policy, known = Policy(draw=draw), len(scores.known)
    while scores.repeats < SETTLED:
        policy.begin()
        plans: list[Plan | None] = []
        while len(plans) < TOGETHER:
            scores.ledger.check_time()
            plans.append(policy.plan(problem, space))
        policy.learn(_rewards(scores.of(plans)))
    return len(scores.known) > known


def _rewards(scores: list[Score | None]) -> Floats:
    """The rewards of a batch of plans: the negative logarithms of their times, standardised. A draw
    that gives no valid plan gets the worst reward of the batch.
    """
    logs = [-np.log(score.penalised_s) for score in scores if score is not None]
    worst = min(logs, default=0.0)
    rewards = np.array([worst if s is None else -np.log(s.penalised_s) for s in scores])
    return np.asarray((rewards - rewards.mean()) / (rewards.std() or 1.0))


@dataclass(slots=True, kw_only=True)
class Policy:
    """A policy: for each choice of a plan, logits of its options; and the options that were chosen
    in the latest plans.
    """

    draw: np.random.Generator
    logits: dict[Choice, Floats] = field(default_factory=dict)
    episodes: list[dict[Choice, int]] = field(default_factory=list)

    def begin(self) -> None:
        """Forget the options that were chosen in the latest plans."""
        self.episodes = []

    def plan(self, problem: Problem, space: SearchSpace) -> Plan | None:
        """Draw a plan from the policy."""
        self.episodes.append({})
        return chosen_plan(problem, space, Chooser(self._place))

    def learn(self, rewards: Floats) -> None:
        """Raise the logits of the options in plans with high rewards, with a small bonus for
        entropy.
        """
        gradients: dict[Choice, Floats] = {}
        for episode, reward in zip(self.episodes, rewards, strict=True):
            for choice, option in episode.items():
                shares = _softmax(self.logits[choice])
                towards = np.eye(len(shares))[option] - shares
                gradients[choice] = gradients.get(choice, 0.0) + reward * towards
        for choice, gradient in gradients.items():
            shares = _softmax(self.logits[choice])
            surprise = -np.log(shares)
            evenness = shares * (surprise - (shares * surprise).sum())
            self.logits[choice] += RATE * (gradient + ENTROPY_BONUS * TOGETHER * evenness)

    def _place(self, name: str, options: int) -> int:
        choice = (name, options)
        logits = self.logits.setdefault(choice, np.zeros(options))
        option = int(self.draw.choice(options, p=_softmax(logits)))
        self.episodes[-1][choice] = option
        return option


def _softmax(logits: Floats) -> Floats:
    shares = np.exp(logits - logits.max())
    return np.asarray(shares / shares.sum())
