"""The search tool: what it finds, the index that processes share, and what is wrong with a corpus."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from shared_data import shared_data, shared_rows

from rtpo_ray.environments.base import ToolEnvironment
from rtpo_ray.tools.base import ToolError
from rtpo_ray.tools.search import Search

ROOT = Path(__file__).parents[2]
ANIMALS = [
    {"title": "Otter", "text": "Otters eat fish.\nThey live in rivers.", "id": 1},
    {"title": "Heron", "text": "A heron eats fish and stands in shallow rivers for hours.", "id": 2},
    {"title": "Café", "text": "Cities have cafés.", "id": 3},
    {"title": "Trout", "text": "A fish of cold rivers and lakes.", "id": 4},
    {"title": "Fish", "text": "Animals with gills.", "id": 5},
]


@pytest.fixture
def corpus(tmp_path):
    return write(tmp_path / "animals.jsonl", ANIMALS)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(corpus, **options):
    return Search(str(corpus), **{"cache": str(corpus.parent / "cache")} | options)


def titles(text):
    return re.findall(r"^\[\d\] (\w+):", text, re.MULTILINE)


def indexes(corpus):
    return sorted(path.name for path in (corpus.parent / "cache").iterdir() if path.is_dir())


def test_the_best_passages_come_first_with_their_rank_and_title(corpus):
    assert make(corpus, top=2).search("Where does the otter live?") == "[1] Otter: Otters eat fish. They live in rivers."
    assert make(corpus).search("cafe in a city").splitlines() == ["[1] Café: Cities have cafés."]  # accents and plurals
    assert titles(make(corpus).search("fish")) == ["Fish", "Trout", "Otter"]  # a word of the title counts twice; a short passage more than a long one
    assert titles(make(corpus, top=9).search("FISH rivers")) == ["Trout", "Otter", "Heron", "Fish"]
    assert make(corpus, chars=20).search("otter") == "[1] Otter: Otters eat fi ..."
    assert make(corpus, title="").search("otter") == "[1] Otters eat fish. They live in rivers."


def test_options_decide_what_is_found(corpus):
    assert titles(make(corpus, english=False).search("a")) == ["Trout", "Heron"]
    assert make(corpus).search("a and in") == "nothing was found for 'a and in'"
    assert make(corpus, english=False).search("otters").startswith("[1] Otter")
    assert make(corpus, english=False, title="").search("otter") == "nothing was found for 'otter'"
    moons = write(corpus.with_name("moons.jsonl"), [{"title": "Moon", "text": "Cold"}, {"title": "Rock", "text": "moon moon moon moon"}])
    assert titles(make(moons, title_weight=1).search("moon")) == ["Rock", "Moon"]
    assert titles(make(moons, title_weight=9).search("moon")) == ["Moon", "Rock"]
    assert titles(make(corpus, b=0.0, k1=0.0).search("fish")) == ["Otter", "Heron", "Trout"]  # equally good: in the corpus's order


def test_equally_good_passages_come_in_the_order_of_the_corpus(tmp_path):
    rows = [{"title": f"T{number}", "text": "the same words" + " and others" * (number % 3)} for number in range(300)]
    search = make(write(tmp_path / "equal.jsonl", rows), top=250)
    found = re.findall(r"^\[\d+\] T(\d+):", search.search("same words"), re.MULTILINE)
    assert list(map(int, found)) == [*range(0, 300, 3), *range(1, 300, 3), *range(2, 150, 3)]


def test_a_query_without_words_is_an_error_and_one_with_unknown_words_finds_nothing(corpus):
    search = make(corpus)
    for query in ("", " \n"):
        with pytest.raises(ToolError, match="the query is empty"):
            search.search(query)
    assert search.search("zebra unicorn") == "nothing was found for 'zebra unicorn'"
    assert search.search("?!") == "nothing was found for '?!'"
    assert search.search("\ud800 otter").startswith("[1] Otter")


def test_parquet_is_searched_like_jsonl(corpus):
    other = corpus.with_suffix(".parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row | {"title": None} if row["id"] == 5 else row for row in ANIMALS]), other)
    assert make(other).search("otter heron") == make(corpus).search("otter heron")
    assert make(other).search("gills") == "[1] Animals with gills."


def test_an_index_is_built_once_and_anew_for_other_content_or_options(corpus):
    first = make(corpus)
    (folder,) = indexes(corpus)
    made = (corpus.parent / "cache" / folder).stat().st_mtime_ns
    copy = write(corpus.with_name("copy.jsonl"), ANIMALS)
    assert make(corpus)._index() is first._index()  # one a process
    assert make(copy, top=1).search("otter") == first.search("otter")
    assert indexes(corpus) == [folder]
    assert (corpus.parent / "cache" / folder).stat().st_mtime_ns == made
    make(corpus, k1=1.2)
    assert len(indexes(corpus)) == 2
    write(corpus, [*ANIMALS, {"title": "Zebra", "text": "Stripes."}])
    assert make(corpus).search("zebra") == "[1] Zebra: Stripes."
    assert len(indexes(corpus)) == 3


def test_a_build_that_was_cut_short_is_made_again(corpus):
    make(corpus)
    cache = corpus.parent / "cache"
    (name,) = indexes(corpus)
    (cache / name).rename(cache / f"{name}.part")
    (cache / f"{name}.part" / "hashes.npy").write_bytes(b"half")
    (cache / f"{name}.part" / "left").touch()
    copy = write(corpus.with_name("copy.jsonl"), ANIMALS)
    assert make(copy).search("otter").startswith("[1] Otter")
    assert indexes(corpus) == [name]
    assert not (cache / name / "left").exists()


def test_the_index_is_mapped_and_in_no_state(corpus):
    environment = ToolEnvironment(toolsets=[make(corpus)])
    index = environment.toolsets[0]._index()
    assert all(isinstance(index._scores.scores[name], np.memmap) for name in ("data", "indices", "indptr"))
    assert all(isinstance(array, np.memmap) for array in (index._hashes, index._ids, index._ends, index._lines))
    before, snapshot = environment.state_hash(), environment.snapshot()
    environment.toolsets[0].search("otter")
    assert environment.state_hash() == before
    assert len(pickle.dumps(environment.toolsets[0])) < 1000
    environment.restore(snapshot)
    assert environment.toolsets[0]._index() is index
    assert environment.toolsets[0].search("otter").startswith("[1] Otter")


def test_processes_that_start_at_once_build_one_index_and_find_the_same(corpus):
    state = pickle.dumps(make(corpus))
    here = make(corpus).search("fish rivers")
    other = write(corpus.with_name("other.jsonl"), [*ANIMALS, {"title": "Zebra", "text": "Stripes."}])
    script = ("import pickle, sys\nfrom rtpo_ray.tools.search import Search\n"
              "print(pickle.loads(bytes.fromhex(sys.argv[1])).search('fish rivers'))\nprint(Search(sys.argv[2], cache=sys.argv[3]).search('zebra'))")
    command = [sys.executable, "-c", script, state.hex(), str(other), str(corpus.parent / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}) for _ in range(2)]
    for process in running:
        assert process.communicate(timeout=60)[0] == f"{here}\n[1] Zebra: Stripes.\n"
    assert len(indexes(corpus)) == 2


@pytest.mark.parametrize(("name", "content", "error"), [
    ("absent.jsonl", None, "corpus is .*absent.jsonl': no such file in .*; expected a .jsonl or .parquet file"),
    ("passages.txt", "x", "expected a .jsonl or .parquet file"),
    ("empty.jsonl", "\n", "the file is empty; expected passages to search"),
    ("stop.jsonl", '{"title": "", "text": "the"}', "no passage has a word"),
    ("fields.jsonl", '{"name": "a", "text": "b"}', "passage 1 has no field 'title'; it has name, text"),
    ("later.jsonl", '{"title": "a", "text": "b"}\n{"title": "a", "body": "b"}', "passage 2 has no field 'text'; it has title, body"),
    ("type.jsonl", '{"title": "a", "text": ["b"]}', "field 'text' of passage 1 is of type list; expected text"),
    ("line.jsonl", '{"title": "a", "text": "b"}\n{"title"', "line 2 is no JSON"),
    ("array.jsonl", "[1]", r"line 1 is '\[1\]'; expected an object"),
])
def test_what_is_wrong_with_a_corpus_is_said_when_the_tool_is_made(tmp_path, name, content, error):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=error):
        make(tmp_path / name)
    assert not [path for path in tmp_path.glob("cache/*") if path.is_dir() and not path.name.endswith(".part")]


def test_a_parquet_file_without_the_field_names_those_it_has(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"name": ["a"], "text": ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="the file has no field 'title'; it has name, text"):
        make(tmp_path / "a.parquet")


@pytest.mark.parametrize(("options", "error"), [
    ({"top": 0}, "top is 0; expected at least 1"), ({"chars": 0}, "chars is 0"), ({"title_weight": 0}, "title_weight is 0"),
    ({"k1": -1.0}, "k1 is -1.0; expected at least 0"), ({"b": 1.5}, "b is 1.5; expected 0 to 1"), ({"text": ""}, "text is empty"),
])
def test_impossible_options_are_refused(corpus, options, error):
    with pytest.raises(ValueError, match=error):
        make(corpus, **options)


def test_a_supporting_paragraph_of_hotpotqa_is_among_the_first_three(tmp_path):
    search = Search(str(shared_data("hotpotqa_distractor_100_corpus.jsonl")), cache=str(tmp_path))
    questions = shared_rows("hotpotqa_distractor_100.jsonl")
    found = sum(any(f"] {title}: " in search.search(row["question"]) for title in row["supporting_facts"]["title"]) for row in questions)
    assert len(questions) == 100
    assert found >= 95
