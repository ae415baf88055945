"""Guards on the shape of the package: signs that somebody should look, not aims of their own."""

import figures


def test_nothing_is_loose_at_the_root() -> None:
    assert figures.root_modules() == []


def test_callbacks_stay_rare() -> None:
    assert len(figures.callables_in_annotations()) <= 35


def test_a_name_stands_for_one_thing() -> None:
    assert len(figures.names_with_several_homes()) <= 20


def test_functions_take_few_parameters() -> None:
    assert figures.functions_with_many_parameters() == []


def test_one_fact_per_line() -> None:
    assert figures.tuple_assignments_of_attributes() == []
    assert figures.ternaries_per_thousand_lines() <= 18


def test_reasons_are_written_down() -> None:
    assert figures.comment_share() >= 0.02


def test_lines_fit() -> None:
    assert figures.long_lines() == []


def test_rooms_are_worth_their_door() -> None:
    assert len(figures.small_files()) <= 10
