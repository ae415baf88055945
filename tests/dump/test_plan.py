"""Who writes what, decided from what the ranks offer, without any rank."""

from dataclasses import replace

from gradsight.core.shards import Place
from gradsight.dump.gradients import Row
from gradsight.dump.plan import Fault, Offer, Plan, decide


def replica(name: str, length: int = 4, crc: int = 1) -> Row:
    """A plain gradient that every rank may have."""
    return Row(
        name, "float32", Place((length,), (0,), (length,)), (length,), alone=False, crc32=crc
    )


def shard(name: str, start: int, size: int, length: int) -> Row:
    return Row(name, "float32", Place((length,), (start,), (size,), mesh="2 on cpu"), (length,))


def offer(*rows: Row, parameters: tuple[str, ...] = ("a", "b", "c", "d"), step: int = 0) -> Offer:
    return Offer(step, rows, parameters, {}, {}, len(rows))


def plan(*offers: Offer) -> Plan:
    made = decide(offers)
    assert isinstance(made, Plan), made
    return made


def test_replicas_are_shared_out_by_size() -> None:
    rows = [replica("a", 100), replica("b", 40), replica("c", 40), replica("d", 20)]
    made = plan(offer(*rows), offer(*rows))
    assert sorted(index for indices in made.choices for index in indices) == [0, 1, 2, 3], (
        "each is written once"
    )
    assert made.lengths == (400, 400)


def test_the_first_rank_writes_where_values_differ() -> None:
    made = plan(offer(replica("a", crc=1)), offer(replica("a", crc=2)))
    assert made.choices == ((0,), ())


def test_a_gradient_that_only_a_later_rank_has() -> None:
    made = plan(offer(replica("b")), offer(replica("a"), replica("b")))
    assert 0 in made.choices[1]


def test_parameters_that_live_on_one_rank() -> None:
    """Stages of a pipeline: each rank has a model of its own."""
    made = plan(offer(replica("a"), parameters=("a",)), offer(replica("b"), parameters=("b",)))
    assert made.choices == ((0,), (0,))
    assert made.parameters == ("a", "b")


def test_a_torn_gradient_is_left_out() -> None:
    made = plan(offer(shard("a", 0, 3, 5), replica("b")), offer(replica("b")))
    assert made.left_out == {"a": "some ranks have their part of this gradient, others have None"}
    assert [len(indices) for indices in made.choices] in ([1, 0], [0, 1])
    whole = plan(offer(shard("a", 0, 3, 5)), offer(shard("a", 3, 2, 5)))
    assert whole.choices == ((0,), (0,))
    assert not whole.left_out


def test_nothing_whole_is_a_fault() -> None:
    made = decide([offer(shard("a", 0, 3, 5)), offer()])
    assert made == Fault(
        "no gradient",
        "no gradient could be had whole; a: some ranks have their part of this gradient, others "
        "have None",
    )


def test_faults_name_their_rank() -> None:
    good = offer(replica("a"))
    assert decide([good, Fault("memory", "no room")]) == Fault("memory", "rank 1: no room")
    assert decide([Fault("memory", "no room")]) == Fault("memory", "no room")
    text = "the ranks dump different steps: 0, 1; call dump() on every rank at the same steps"
    assert decide([good, replace(good, step=1)]) == Fault("usage", text)
    nothing = replace(good, rows=(), seen=0)
    assert decide([nothing, nothing]) == Fault(
        "no gradient",
        "no parameter has a gradient on any rank: dump after backward() and before zero_grad()",
    )
