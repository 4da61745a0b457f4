"""Translates the routers of experts to Megatron-LM's options, and back: how tokens choose experts,
and how load is balanced.

In Megatron-LM the weights of a token's experts follow from their scores. Sigmoid scores are
normalised if a token uses several experts; for one expert they are used as they are. A softmax is
taken over the scores of the chosen experts, or with ``--moe-router-pre-softmax`` over those of all
experts and not normalised afterwards. Where a token chooses groups of experts first, the score of a
group is the sum of its best scores: of as many as the token uses experts of each chosen group
(``megatron/core/transformer/moe/moe_utils.py``).
"""

from collections.abc import Iterator

from mistlab.core.values import within
from mistlab.export.megatron.megatron_flags import Options, is_of_deepspeed
from mistlab.plan.model_parts import Experts
from mistlab.plan.routers import PLAIN_ROUTER, Router

# The options for an auxiliary loss that balances the load of experts, with the coefficient that
# Megatron-LM recommends.
BALANCE = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
# The default rate at which Megatron-LM updates the expert bias.
_RATE = 0.001


def router_options(experts: Experts) -> Iterator[str]:
    """Yield the options for the rule by which tokens choose experts."""
    router = experts.router
    if router.scores == "sigmoid":
        yield "--moe-router-score-function sigmoid"
    elif experts.active == 1 or not router.normalized:
        # If a token uses a single expert, Megatron-LM requires the softmax before the choice.
        yield "--moe-router-pre-softmax"
    if router.groups > 1 and experts.active >= router.active_groups:
        chosen = f"--moe-router-group-topk {router.active_groups}"
        yield f"--moe-router-num-groups {router.groups} {chosen}"
    if router.scale != 1:
        yield f"--moe-router-topk-scaling-factor {router.scale!r}"
    if _is_corrected(router):
        yield "--moe-router-enable-expert-bias"
        if router.correction_rate != _RATE:
            yield f"--moe-router-bias-update-rate {router.correction_rate!r}"
    if router.weighs_inputs and experts.active == 1:
        yield "--moe-apply-probs-on-input"
    if router.z_loss:
        yield f"--moe-z-loss-coeff {router.z_loss!r}"


def router_of(options: Options, active: int) -> Router:
    """Return the rule by which tokens choose experts that the options describe; ``active`` is the
    number of experts per token.
    """
    if is_of_deepspeed(options):
        return PLAIN_ROUTER
    is_sigmoid = options.text("--moe-router-score-function") == "sigmoid"
    groups = options.whole("--moe-router-num-groups") or 1
    chosen = min(options.whole("--moe-router-group-topk") or groups, groups)
    corrects = is_sigmoid and options.has("--moe-router-enable-expert-bias")
    of_sequences = options.text("--moe-router-load-balancing-type") == "seq_aux_loss"
    coefficient = options.number("--moe-aux-loss-coeff", 0.0) if of_sequences else 0.0
    is_over_all = options.has("--moe-router-pre-softmax") and active > 1
    with within("router"):
        return Router(
            scores="sigmoid" if is_sigmoid else "softmax",
            normalized=active > 1 if is_sigmoid else not is_over_all,
            scale=options.number("--moe-router-topk-scaling-factor", 0.0) or 1.0,
            weighs_inputs=options.has("--moe-apply-probs-on-input"),
            correction=corrects,
            correction_rate=options.number("--moe-router-bias-update-rate", _RATE) * corrects,
            groups=groups,
            active_groups=chosen,
            best_of_group=max(active // chosen, 1) if groups > 1 else PLAIN_ROUTER.best_of_group,
            balance_loss=coefficient,
            z_loss=options.number("--moe-z-loss-coeff", 0.0),
        )


def balance_options(router: Router) -> str:
    """Return the options that balance the load of experts: an auxiliary loss per sequence, the
    expert bias alone, or else Megatron-LM's default.
    """
    if router.balance_loss:
        coefficient = f"--moe-aux-loss-coeff {router.balance_loss!r}"
        return f"--moe-router-load-balancing-type seq_aux_loss {coefficient}"
    if _is_corrected(router) and router.correction_rate:
        return "--moe-router-load-balancing-type none"
    return BALANCE


def router_notes(experts: Experts | None) -> Iterator[str]:
    """Yield notes on properties of a router that no option of Megatron-LM can express."""
    if experts is None or experts.router == PLAIN_ROUTER:
        return
    router, active = experts.router, experts.active
    if router.scores == "sigmoid" and router.normalized != (active > 1):
        done = "keeps" if active == 1 else "normalises"
        yield f"Megatron-LM {done} sigmoid weights of experts; the model's router does not"
    if router.scores == "softmax" and active == 1 and router.normalized:
        yield "Megatron-LM weighs a token's expert by its score; the model's router by 1"
    if router.scores == "softmax" and router.correction:
        yield "Megatron-LM has expert bias with sigmoid scores only: the line leaves it out"
    best = active // router.active_groups
    if router.groups > 1 and not best:
        yield "a token chooses fewer experts than groups: the line leaves groups of experts out"
    elif router.groups > 1 and router.best_of_group != best:
        by_model = f"the model's router by the best {router.best_of_group}"
        yield f"Megatron-LM ranks groups of experts by their best {best} scores; {by_model}"
    if router.weighs_inputs and active > 1:
        yield "Megatron-LM multiplies the experts' outputs by their weights, not their inputs"


def _is_corrected(router: Router) -> bool:
    return router.correction and router.scores == "sigmoid"
