"""Models on the same cores compute one step at a time, and each gets its share."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.scheduler.policy.core_sharing import PROMPT_LEAD_S, Claim, CoreShares, allowed_depth, overlap

CORES = st.sampled_from([frozenset(), frozenset({0, 1}), frozenset({1, 2}), frozenset({3})])


def test_a_model_alone_runs_ahead() -> None:
    mine = Claim("a", frozenset({0}), 1.0, True)
    other = Claim("b", frozenset({1}), 1.0, True)
    assert allowed_depth(mine, [mine], 2) == 2
    assert allowed_depth(mine, [mine, other], 2) == 2
    assert allowed_depth(mine, [mine, other._replace(cores=frozenset())], 2) == 0
    assert allowed_depth(mine, [mine, other._replace(cores=frozenset(), is_computing=False)], 2) == 1


def test_cores_are_kept_for_a_model_that_waits_for_others() -> None:
    first = Claim("a", frozenset({0, 1}), 0.0, False)
    busy = Claim("b", frozenset({0}), 0.0, True)
    later = Claim("c", frozenset({1}), 0.0, False)
    elsewhere = Claim("d", frozenset({2}), 0.0, False)
    claims = [first, busy, later, elsewhere]
    assert allowed_depth(first, claims, 2) == 0
    assert allowed_depth(later, claims, 2) == 1
    assert allowed_depth(later, claims, 2, {"a"}) == 0
    assert allowed_depth(elsewhere, claims, 2, {"a"}) == 2


@given(
    cores=st.lists(CORES, min_size=2, max_size=4),
    costs=st.lists(st.floats(0.001, 1.0), min_size=4, max_size=4),
    active=st.lists(st.sets(st.integers(0, 3)), min_size=20, max_size=120),
)
def test_one_step_at_a_time_and_a_fair_share(
    cores: list[frozenset[int]], costs: list[float], active: list[set[int]]
) -> None:
    """Steps end in the order in which they began; the models with claims change all the time."""
    shares = CoreShares()
    spent = [0.0] * len(cores)
    computing: list[int] = []
    waited = [0] * len(cores)  # rounds with a claim and without a step
    for wanting in active:
        if computing:
            done = computing.pop(0)
            spent[done] += costs[done]
        wanting = {i for i in wanting if i < len(cores)} | set(computing)

        def claims(now: set[int] = wanting) -> list[Claim]:
            return [Claim(str(i), cores[i], spent[i], i in computing) for i in sorted(now)]

        waiting: set[str] = set()
        for name in shares.order(claims()):
            i = int(name)
            mine = next(claim for claim in claims() if claim.name == name)
            depth = allowed_depth(mine, claims(), 2, waiting)
            if i not in computing and depth:
                computing.append(i)
            elif i not in computing:
                waiting.add(name)
            waited[i] = 0 if i in computing else waited[i] + 1
        for i in range(len(cores)):
            if i not in wanting:
                waited[i] = 0
        for one in computing:
            for other in computing:
                assert one == other or not overlap(cores[one], cores[other])
        # No model waits for ever: computed steps give the others precedence.
        bound = 4 * len(cores) * (1 + int(max(costs) / min(costs)))
        assert max(waited) <= bound


def test_equal_shares_of_time_not_of_steps() -> None:
    shares = CoreShares()
    spent = {"short": 0.0, "long": 0.0}
    cost = {"short": 0.01, "long": 0.05}
    for _ in range(1000):
        first = shares.order([Claim(name, frozenset(), used, False) for name, used in spent.items()])[0]
        spent[first] += cost[first]
    assert abs(spent["short"] - spent["long"]) <= 0.05 + 1e-9


@settings(deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 1000.0), min_size=2, max_size=4),
    costs=st.lists(st.floats(0.001, 0.1), min_size=4, max_size=4),
)
def test_computing_time_follows_the_weights(weights: list[float], costs: list[float]) -> None:
    shares = CoreShares()
    spent = [0.0] * len(weights)
    for _ in range(300):
        claims = [Claim(str(i), frozenset(), spent[i], False, weight=weight) for i, weight in enumerate(weights)]
        first = int(shares.order(claims)[0])
        spent[first] += costs[first]
    # No account is ahead of another by more than the last step of its model.
    accounts = [time / weight for time, weight in zip(spent, weights, strict=True)]
    lowest = min(accounts)
    for i, account in enumerate(accounts):
        assert account - lowest <= costs[i] / weights[i] + 1e-6 * account


def test_a_prompt_goes_first_for_the_same_computing_time_at_each_weight() -> None:
    for weight in (0.1, 1.0, 10.0):
        shares = CoreShares()
        spent = {"old": 0.0, "new": 0.0}
        while True:
            claims = [Claim(name, frozenset(), used, False, name == "new", weight) for name, used in spent.items()]
            first = shares.order(claims)[0]
            if first == "old":
                break
            spent[first] += 0.05
        assert abs(spent["new"] - PROMPT_LEAD_S) <= 0.05 + 1e-9


def test_prompts_go_first_for_a_while() -> None:
    shares = CoreShares()
    spent = {"old": 0.0, "new": 0.0}
    won: list[str] = []
    for _ in range(200):
        claims = [Claim(name, frozenset(), used, False, name == "new") for name, used in spent.items()]
        won.append(shares.order(claims)[0])
        spent[won[-1]] += 0.05
    lead = won.index("old")
    assert lead * 0.05 >= PROMPT_LEAD_S
    # After that each has its share: an endless series of prompts starves no model.
    assert abs(spent["new"] - spent["old"]) <= PROMPT_LEAD_S + 0.05 + 1e-9


def test_idle_time_is_not_made_up_for() -> None:
    shares = CoreShares()
    busy, late = Claim("busy", frozenset(), 0.0, False), Claim("late", frozenset(), 0.0, False)
    shares.order([busy, late])
    assert shares.order([busy._replace(spent_s=100.0)]) == ["busy"]
    shares.order([busy._replace(spent_s=100.0), late])
    # From here on they alternate: the late model does not get a hundred seconds at once.
    assert shares.order([busy._replace(spent_s=100.0), late._replace(spent_s=0.01)]) == ["busy", "late"]


def test_short_requests_one_after_the_other_get_no_more_than_a_long_one() -> None:
    """A model with prompts goes first for a while, which does not begin again with each request."""
    shares = CoreShares()
    spent = {"old": 0.0, "other": 0.0, "new": 0.0}
    for _ in range(100):
        for has_request in (True, True, True, False):
            claims = [Claim(name, frozenset(), used, False, name == "new") for name, used in spent.items()]
            wanting = [claim for claim in claims if has_request or claim.name != "new"]
            first = shares.order(wanting, [claim for claim in claims if claim not in wanting])[0]
            spent[first] += 0.2
    assert spent["new"] <= sum(spent.values()) / 3 + PROMPT_LEAD_S + 0.2


def test_a_model_whose_turn_passes_does_not_make_up_for_it() -> None:
    """Its sequences wait for pages: what others compute meanwhile is not made up for."""
    shares = CoreShares()
    spent = {"busy": 0.0, "waiting": 0.0}

    def order() -> list[str]:
        return shares.order([Claim(name, frozenset(), used, False) for name, used in spent.items()])

    for _ in range(100):
        order()
        shares.pass_over("waiting")
        spent["busy"] += 1.0
    won = []
    for _ in range(20):
        won.append(order()[0])
        spent[won[-1]] += 1.0
    assert 9 <= won.count("busy") <= 11


def test_models_on_different_cores_are_not_compared() -> None:
    """One of them has computed far more than the other one when a third shares the cores of both."""
    shares = CoreShares()
    spent = {"busy": 0.0, "quiet": 0.0, "late": 0.0}
    cores = {"busy": frozenset({0}), "quiet": frozenset({1}), "late": frozenset({0, 1})}

    def claims(*names: str) -> list[Claim]:
        return [Claim(name, cores[name], spent[name], False) for name in names]

    for _ in range(100):
        shares.order(claims("busy", "quiet"), claims("late"))
        spent["busy"] += 1.0
        spent["quiet"] += 0.01
    shares.order([], claims("busy", "quiet", "late"))
    won = []
    for _ in range(20):
        won.append(shares.order(claims("busy", "late"), claims("quiet"))[0])
        spent[won[-1]] += 1.0
    assert 9 <= won.count("busy") <= 11


def test_a_model_that_is_idle_for_a_moment_keeps_its_account_with_those_on_its_cores() -> None:
    """Others that compute elsewhere do not pay it off."""
    shares = CoreShares()
    spent = {"old": 0.0, "new": 0.0, "elsewhere": 0.0}
    cores = {"old": frozenset({0}), "new": frozenset({0}), "elsewhere": frozenset({1})}

    def claims(*names: str) -> list[Claim]:
        return [Claim(name, cores[name], spent[name], False, name == "new") for name in names]

    shares.order(claims("old", "new", "elsewhere"))
    spent["new"] += 3.0
    shares.order(claims("old", "new", "elsewhere"))
    spent["elsewhere"] += 100.0
    shares.order(claims("elsewhere"), claims("old", "new"))
    assert shares.order(claims("old", "new", "elsewhere"))[-1] == "new"
