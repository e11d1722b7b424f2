"""The steps of the sampler: their names in requests and configurations, their numbers in the step arena."""

SAMPLER_STEPS = {
    "mask": 1,
    "repetition": 2,
    "temperature": 3,
    "top_k": 4,
    "top_p": 5,
    "penalties": 6,
    "dry": 7,
    "top_n_sigma": 8,
    "typical_p": 9,
    "min_p": 10,
    "xtc": 11,
}
DEFAULT_ORDER = (
    "mask",
    "repetition",
    "dry",
    "temperature",
    "top_n_sigma",
    "top_k",
    "typical_p",
    "top_p",
    "min_p",
    "xtc",
    "penalties",
)


def order_problem(order: tuple[str, ...]) -> str:
    """Why `order` is not a valid order of steps; "" when it is. An empty one stands for the default."""
    for index, step in enumerate(order):
        if step not in SAMPLER_STEPS:
            return f"{step!r} is no step; there are {', '.join(DEFAULT_ORDER)}"
        if step in order[:index]:
            return f"{step!r} is listed twice; a step is applied once"
    if order and "mask" not in order:
        return '"mask" is missing, which is always applied; add it'
    return ""
