"""Answers in words: where they are found, exact match, F1 and hit."""

import pytest
from shared_data import shared_rows

from rtpo_ray.errors import GraderError
from rtpo_ray.rewards import build
from rtpo_ray.rewards.text import F1, Exact, Hit, words


@pytest.mark.parametrize(("response", "found"), [
    ("<answer>Ada</answer> or <answer> Ben </answer>. Answer: Cai \\boxed{Dan}", True),
    ("<answer>Ada <answer>Ben</answer>", True),
    ("<answer>Ben", False),  # not closed: no answer, so the whole text
    ("Answer: Ada \\boxed{\\text{Ben}}", True),
    ("I think of Ada.\nAnswer: Ada\n**Final answer: Ben**\nBye", True),
    ("ben!", True),
    ("It is Ben", False),
    ("<think><answer>Ada</answer></think><answer>Ben</answer>", True),
    ("<think><answer>Ben</answer>", False),
])
def test_where_the_answer_is(response, found):
    assert Exact().grade(response, {"answer": "Ben"}) == found


def test_the_whole_response_counts_only_where_it_may():
    strict = Exact(whole=False)
    assert (Exact().grade("Ben", {"answer": "Ben"}), strict.grade("Ben", {"answer": "Ben"})) == (1.0, 0.0)
    assert strict.grade("<answer></answer>", {"answer": "Ben"}) == 0.0
    assert strict.counts == {"no_answer": 2}


@pytest.mark.parametrize(("text", "found"), [
    ("The  Cold-War, (1947–91)!", ["coldwar", "1947–91"]), ("an apple a day", ["apple", "day"]), ("theatre", ["theatre"]),
    ("A", ["a"]), ("the", ["the"]), ("!?", ["!?"]), ("", []), ("U.S.", ["us"]),
])
def test_words_as_squad_compares_them(text, found):
    assert words(text) == found


@pytest.mark.parametrize(("answer", "gold", "exact", "f1", "hit"), [
    ("The Dark Tower", "dark tower", 1, 1, 1),
    ("the tower", "dark tower", 0, 2 / 3, 0),
    ("It is Bath, Maine.", "Bath, Maine", 0, 2 * 2 / (4 + 2), 1),
    ("Maine Bath", "Bath, Maine", 0, 1, 0),
    ("new new york", "new york", 0, 2 * 2 / 5, 1),
    ("new", "new new", 0, 2 / 3, 0),  # a word counts as often as it occurs
    ("Ben", "Ada", 0, 0, 0),
    ("no", "no", 1, 1, 1),
    ("no way", "no", 0, 0, 1),
    ("yes", "yes it is", 0, 0, 0),
    ("no", "yes", 0, 0, 0),
    ("1941", 1941, 1, 1, 1),
    ("cat", "category", 0, 0, 0),
    ("category", "cat", 0, 0, 0),  # whole words
])
def test_what_an_answer_is_worth(answer, gold, exact, f1, hit):
    row = {"answer": gold}
    assert (Exact().grade(answer, row), F1().grade(answer, row), Hit().grade(answer, row)) == (exact, pytest.approx(f1), hit)


def test_the_best_of_several_golds_counts():
    row = {"aliases": ["J. R. R. Tolkien", "Tolkien", "the author John Tolkien"]}
    assert F1(gold="aliases").grade("John Ronald Tolkien", row) == pytest.approx(2 * 2 / (3 + 3))
    assert (Exact(gold="aliases").grade("Tolkien", row), Hit(gold="aliases").grade("Who but Tolkien?", row)) == (1.0, 1.0)


@pytest.mark.parametrize("name", ["exact", "f1", "hit"])
def test_golds_that_are_none_are_errors_and_graders_are_instant(name):
    grader = build(name)
    assert grader.instant
    for row in ({}, {"answer": ""}, {"answer": None}, {"answer": []}):
        with pytest.raises(GraderError, match="'answer'"):
            grader.grade("Ben", row)


def test_hotpotqa_golds():
    rows = shared_rows("hotpotqa_distractor_100.jsonl")
    for name in ("exact", "f1", "hit"):
        grader = build(name)
        assert sum(grader.grade(f"<think>x</think>So <answer>{row['answer']}</answer>", row) for row in rows) == 100
    strangers = [Exact().grade(row["answer"], other) for row in rows for other in rows if words(row["answer"]) != words(other["answer"])]
    assert (len(strangers) > 9_800, sum(strangers)) == (True, 0)


@pytest.mark.parametrize("answer", ["A", "A.", "(A)", "a", "<answer>A</answer>"])
@pytest.mark.parametrize("kind", [Exact, F1, Hit])
def test_a_gold_that_is_an_article_is_a_word(kind, answer):
    assert kind().grade(answer, {"answer": "A"}) == 1.0
    assert kind().grade("B", {"answer": "A"}) == 0.0
