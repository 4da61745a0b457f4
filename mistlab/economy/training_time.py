"""How long a training takes by a formula: 8 T P / (N F U) (Narayanan et al., SC 2021, section 5.1).

T tokens through P parameters take 8 T P operations where every activation is computed again: two
a parameter and token forward, four backward, two for the second forward. N GPUs do F a second at
their peak, and sustain the share U of it.
"""

# Hoffmann et al. 2022 (arXiv 2203.15556): about 20 tokens a parameter are the best use of a given
# number of operations.
CHINCHILLA_TOKENS_A_PARAMETER = 20.0
OPERATIONS_RECOMPUTED = 8.0


def training_s(
    *, tokens: float, parameters: float, gpus: int, peak_flop_per_s: float, utilisation: float
) -> float:
    """Seconds of a training whose GPUs sustain a share of their peak.

    >>> seconds = training_s(
    ...     tokens=300e9, parameters=175e9, gpus=1024, peak_flop_per_s=312e12, utilisation=0.44
    ... )
    >>> round(seconds / 86400, 1)
    34.6
    """
    operations = OPERATIONS_RECOMPUTED * tokens * parameters
    return operations / (gpus * peak_flop_per_s * utilisation)


def utilisation_of(
    *, tokens: float, parameters: float, gpus: int, peak_flop_per_s: float, seconds: float
) -> float:
    """The share U of the peak at which the formula gives these seconds."""
    at_peak_s = training_s(
        tokens=tokens,
        parameters=parameters,
        gpus=gpus,
        peak_flop_per_s=peak_flop_per_s,
        utilisation=1.0,
    )
    return at_peak_s / seconds


def chinchilla_tokens(parameters: float) -> float:
    """The tokens that make the best use of the operations spent on a model of this size."""
    return CHINCHILLA_TOKENS_A_PARAMETER * parameters


def batch_of(batch_tokens: float, sequence_length: int) -> int:
    """Sequences of a step of about so many tokens, rounded so that many degrees divide them: to a
    multiple of half the largest power of two that is not above their number.

    >>> batch_of(3.2e6, 2048), batch_of(4e6, 2048), batch_of(0.5e6, 2048)
    (1536, 2048, 256)
    """
    sequences = max(1, round(batch_tokens / sequence_length))
    step = 1 << max(0, sequences.bit_length() - 2)
    return max(1, round(sequences / step) * step)


def steps_of(tokens: float, tokens_a_step: int) -> float:
    """The steps in which so many tokens are trained on."""
    return tokens / tokens_a_step
