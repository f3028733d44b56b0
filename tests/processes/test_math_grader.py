"""Answers in mathematics: where they are found, what is compared exactly, and what math-verify says, in processes that can be killed."""

import os
import pickle
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from shared_data import shared_rows

from rtpo_ray.errors import GraderError
from rtpo_ray.rewards import GRADERS, build, pool, verifier
from rtpo_ray.rewards.math import Math, bare, normal, number, plainly_same

ROOT = Path(__file__).parents[2]
HANGS = "10^{10^{8}}"
MATH = Math()


def grade(answer, gold):
    return MATH.grade(f"\\boxed{{{answer}}}", {"answer": gold})


def workers():
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "verifier.py" in " ".join(child.cmdline())]


# where the answer is

@pytest.mark.parametrize(("response", "gold"), [
    (r"\boxed{4} no, \boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),  # escaped braces are no braces
    (r"\boxed{7} and then \boxed{8", "7"),  # cut off
    (r"\fbox{3}", "3"),
    (r"#### 12 and \boxed{3}", "3"),
    ("He has 3.\n#### 1,234", "1234"),
    ("#### 18 dollars", "18"),
    ("#### $18.50 per day\n", "18.5"),
    ("4 of 9. The answer is **5**. I am sure: 6", "5"),
    ("Answer: $\\frac{3}{4}$.", "0.75"),
    ("The final answer is \\(x=5\\)", "5"),
    ("the answer is 3.14.", "3.14"),
    ("so 12 - 5 leaves 7 of 20, hence 30-7", "7"),  # a minus between numbers is no sign
    ("it fell to -4.", "-4"),
    ("so \\frac{1}{2}", "0.5"),
    ("<think>\\boxed{3}</think>\\boxed{4}", "4"),
    ("\\boxed{3}</think>\\boxed{4}", "4"),  # the template wrote the opening tag
])
def test_the_answer_is_found(response, gold):
    assert MATH.grade(response, {"answer": gold}) == 1.0


@pytest.mark.parametrize("response", ["", "no idea", "<think>\\boxed{4}", "<think>\\boxed{4}</think>", "\\boxed{}",
                                      "<think>a</think> <think>\\boxed{4}"])
def test_no_answer_is_worth_nothing_and_counted(response):
    grader = Math()
    assert grader.grade(response, {"answer": "4"}) == 0.0
    assert grader.counts == {"no_answer": 1}


def test_the_last_number_counts_only_where_it_may():
    assert Math().grade("so there are 4", {"answer": 4}) == 1.0
    assert Math(last_number=False).grade("so there are 4", {"answer": 4}) == 0.0


def test_a_hopelessly_long_response_takes_no_time():
    grader = Math()
    started = time.monotonic()
    assert grader.grade("\\boxed{" * 30_000, {"answer": "4"}) == 0.0
    assert grader.grade("<answer>" * 30_000 + "answer is " * 30_000 + "9" * 100_000, {"answer": "4"}) == 0.0
    assert grader.grade(f"\\boxed{{{' ' * 9_000}x{'1,' * 400}}}", {"answer": "4"}) == 0.0
    assert time.monotonic() - started < 5
    assert grader.counts["too_long"] == 1


# golds

@pytest.mark.parametrize("gold", [5, 5.0, "5", ["4", "5"], [5], r"Thus \boxed{5}.", "so\n#### 5", "$5$", "5."])
def test_forms_of_a_gold(gold):
    assert (grade("5", gold), grade("6", gold)) == (1.0, 0.0)


def test_numbers_that_python_writes_with_an_exponent():
    assert (grade("0.0000001", 1e-7), grade("1" + "0" * 22, 1e22)) == (1.0, 1.0)


@pytest.mark.parametrize("gold", ["", None, [], [""], True, [None], "$$", "$.$"])
def test_a_gold_that_is_none_is_an_error(gold):
    with pytest.raises(GraderError, match="answer"):
        grade("5", gold)


def test_a_row_without_the_field_is_an_error():
    with pytest.raises(GraderError, match="no field 'final'; it has answer, id"):
        Math(gold="final").grade("5", {"answer": 5, "id": 0})


def test_a_gold_that_cannot_be_parsed_is_an_error_unless_the_answer_is_the_same_text():
    gold = "$m_{\\max }=n$"
    assert grade("m_{\\max} = n", gold) == 1.0
    with pytest.raises(GraderError, match="no mathematics that math-verify can parse"):
        grade("m=n", gold)


# plain comparisons

@pytest.mark.parametrize(("gold", "answer", "same"), [
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\dfrac{\\pi}{2})", True), ("90^\\circ", "90", True), ("15\\mbox{ cm}^2", "15", True),
    ("\\frac{270}7\\text{ degrees}", "\\frac{270}{7}", True), ("\\$32,\\!348", "32348", True), ("11,\\! 111,\\! 111,\\! 100", "11,111,111,100", True),
    ("\\frac43", "\\frac{8}{6}", True), (".35625", "0.356250", True), ("1/3", "0.333333", False), (".0000672", "0.000067", False),
    ("10^{-8}", "0.0", None), ("62.5%", "62.5", True), ("-5\\%", "-5", True), ("62.5\\%", "0.625", True), ("0.5", "50 \\%", True),
    ("5\\%", "6\\%", False),
    ("5\\%", "500", False), ("-\\frac{35}{9}", "\\frac{-35}{9}", True), ("31/2", "3 1/2", None), ("\\text{(C)}", "C", True),
    ("\\text{(C)}", "\\textbf{(B)}", False), ("\\text{east}", "\\text{ East}", True), ("\\text{east}", "seat", False), ("2\\frac12", "2.5", None),
    ("100, 200", "100200", None), ("5", "1/0", None), ("x+1", "1+x", None), ("9" * 2000, "8", None),
])
def test_what_is_plain(gold, answer, same):
    assert plainly_same(gold, answer) is same


def test_the_plain_comparison_agrees_with_math_verify_wherever_it_decides():
    """MATH-500 and GSM8K: every gold against those of others and against near misses and other forms of itself."""
    meaning, rng, decided, wrong = {}, random.Random(0), 0, []
    maths = list(dict.fromkeys(row["answer"] for row in shared_rows("math500.jsonl")))
    schools = list(dict.fromkeys(row["final"] for row in shared_rows("gsm8k_test.jsonl")))

    def parsed(text):
        if text not in meaning:
            meaning[text] = verifier.parse(bare(text))
        return meaning[text]

    for gold in maths + schools:
        others = rng.sample(maths, 6) + rng.sample(schools, 2)
        if (value := number(normal(gold))) and value[0] >= 0:
            exact = value[0]
            others += [f"{exact + 1}", f"{exact - 1}", f"{-exact}", f"{exact * 10}", f"{float(exact) + 0.25}", f"\\${gold}", f"{gold}\\text{{ m}}"]
        for answer in [gold, *others]:
            if (same := plainly_same(gold, answer)) is not None:
                decided += 1
                if same != verifier.same(parsed(gold), parsed(answer)):
                    wrong.append((gold, answer, same))
    assert decided > 6_000
    assert wrong == []


# math-verify

def math500():
    return [row["answer"] for row in shared_rows("math500.jsonl")]


def test_math500_golds_are_right_from_a_cold_pool_under_sixteen_threads_and_from_a_warm_one():
    golds = math500()
    pool.shared().close()
    with ThreadPoolExecutor(16) as threads:
        cold = list(threads.map(lambda gold: MATH.same(gold, gold), golds))
        warm = list(threads.map(lambda gold: MATH.same(gold, gold), golds))
    assert (cold.count(True), warm.count(True)) == (500, 500)
    assert len(workers()) == 2


def test_wrong_answers_to_math500_are_wrong_through_math_verify():
    golds, rng, answers = list(dict.fromkeys(math500())), random.Random(1), []
    for gold in golds:
        if number(normal(gold)) is not None:
            value = number(normal(gold))[0]
            answers += [(gold, f"{value + 1}")]
        elif gold.startswith("(") and gold.count(",") == 1 and "infty" not in gold:
            first, second = gold.strip("()[]").split(",")[:2] if "cup" not in gold else ("1", "2")
            answers += [(gold, f"({second},{first})"), (gold, f"({first},{second},0)")]
        elif "text" not in gold and "," not in gold and "=" not in gold and "pmatrix" not in gold and "in" not in gold:
            answers += [(gold, f"{gold}+1"), (gold, f"2({gold})"), (gold, f"-({gold})")]
        answers += [(gold, other) for other in rng.sample(golds, 2) if normal(other) != normal(gold)]
    with ThreadPoolExecutor(4) as threads:
        verdicts = list(threads.map(lambda pair: MATH.same(*pair), answers))
    taken = {pair for pair, verdict in zip(answers, verdicts, strict=True) if verdict}
    # 52_8 and 52 are the same to math-verify, which knows no bases.
    assert {pair for pair in taken if plainly_same(*pair) is not True and "_" not in "".join(pair)} == set()
    assert len(answers) > 900


def test_worked_solutions_of_math500_and_gsm8k():
    assert sum(MATH.grade(row["solution"], row) for row in shared_rows("math500.jsonl")) == 500
    school, final = shared_rows("gsm8k_test.jsonl"), Math(gold="final")
    assert sum(final.grade(row["answer"], row) for row in school) == 1319
    assert sum(MATH.grade(f"The answer is ${int(row['final'].replace(',', '')) + 1}.", row) for row in school) == 0


def test_olympiadbench_golds():
    """math-verify takes 672 of 675 for themselves. It can parse none of the others: one is a sentence, one has \\max in an index and one is
    the misprint t(0,4]; these are right as the same text only."""
    golds = [gold for row in shared_rows("olympiadbench_oe_to_en_math.jsonl") for gold in row["final_answer"]]

    def verdict(gold):
        assert grade(gold, gold) == 1.0
        try:
            return MATH.same(gold, gold)
        except GraderError:
            return None

    with ThreadPoolExecutor(2) as threads:
        verdicts = list(threads.map(verdict, golds))
    assert (len(golds), verdicts.count(True)) == (675, 672)
    assert [gold[:12] for gold, verdict in zip(golds, verdicts, strict=True) if verdict is None] == ["$m_{\\max }=n", "$f(x)=a x+b$", "$t(0,4]$"]


@pytest.mark.parametrize(("gold", "answer", "forth", "back"), [
    ("5", "x=5", True, True), ("x=9", "y=9", False, False), ("5", "5=5", True, False), ("1", "2=1", True, False),  # only the right side counts
    ("2x+3", "y=2x+3", True, True), ("y=2x+3", "2x-y+3=0", True, True),
    ("(3,4]", "3<x\\le 4", True, True), ("[-2,7]", "x \\in [-2,7]", True, True),
    ("(2,4)", "2,4", True, True), ("(2,4)", "(4,2)", False, False), ("1,-2", "-2,1", True, True), ("(-2,1)", "1,-2", False, True),
    ("\\{5\\}", "5", True, True), ("5", "5,6", False, False), ("5", "5 or 6", False, False), ("[2,4]", "(2,4)", False, False),
    ("3 \\pm 2\\sqrt{2}", "3-2\\sqrt2, 3+2\\sqrt2", True, True), ("a=2,b=3", "a=3,b=2", False, False), ("2,3", "x=2 \\text{ or } x=3", True, True),
    ("52_8", "52", True, True), ("\\pi", "3.14159", False, False), ("\\pi", "3.141593", True, True),
    ("\\frac{\\pi}{6}", "30^\\circ", False, False), ("8\\%", "\\frac{2}{25}", True, True), ("1\\frac{4}{5}", "1.8", True, True),
    ("2k+2", "2n+2", False, False), ("(a+5)(b+2)", "ab+2a+5b+10", True, True), ("\\cot x", "\\frac{1}{\\tan x}", True, True),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{bmatrix} 1 \\\\ 2 \\end{bmatrix}", True, True),
    ("5\\%", "5", True, True), ("62.5\\%", "62.5", False, False), ("-5\\%", "-5", False, False),  # the plain comparison takes all three
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "(1,2)", False, False), ("\\emptyset", "\\{\\}", True, True),
])
def test_what_math_verify_takes_for_the_same(gold, answer, forth, back):
    """`forth`: the answer where the gold is right; `back`: the two exchanged."""
    assert (MATH.same(gold, answer), MATH.same(answer, gold)) == (forth, back)


# the pool

def test_an_answer_that_hangs_is_worth_nothing_and_the_next_verdict_is_right():
    grader = Math(seconds=0.5)
    MATH.same("1", "1")
    before = {worker.pid for worker in workers()}
    started = time.monotonic()
    assert grader.grade(f"\\boxed{{{HANGS}}}", {"answer": ["5", "6"]}) == 0.0
    assert grader.counts == {"overrun": 1}
    assert grader.grade("\\boxed{1+x}", {"answer": "x+1"}) == 1.0
    assert time.monotonic() - started < 30  # 2 s on an idle machine
    assert len(before - {worker.pid for worker in workers()}) >= 1


def test_an_answer_that_hangs_does_not_hide_another_gold():
    assert Math(seconds=0.5).grade("\\boxed{(x+1)^2}", {"answer": ["x^2+2x+1", "7"]}) == 1.0


def test_a_gold_that_hangs_is_an_error():
    grader = Math(seconds=0.5)
    with pytest.raises(GraderError, match="could not be evaluated within 0.5 s"):
        grader.grade("\\boxed{5}", {"answer": HANGS})
    assert grader.counts == {}


def test_a_worker_killed_while_it_waits_is_replaced():
    MATH.same("1", "1")
    for worker in workers():
        worker.send_signal(signal.SIGKILL)
        until = time.monotonic() + 10
        while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:  # the kernel takes a moment
            assert time.monotonic() < until
    assert MATH.same("x+1", "1+x")
    assert 1 <= len(workers()) <= 2


def test_a_worker_that_dies_at_work_is_retried_once_and_then_an_error(monkeypatch):
    crowd, ask, deaths = pool.Pool(), pool._Worker.ask, []

    def die(worker, *arguments):
        if len(deaths) < most:
            deaths.append(worker.process.pid)
            worker.process.kill()
        return ask(worker, *arguments)

    monkeypatch.setattr(pool._Worker, "ask", die)
    most = 1
    assert crowd.same("x+1", "1+x", seconds=5.0, size=1)
    most = 3
    with pytest.raises(GraderError, match="two workers in a row died on '1[+]x' against 'x[+]1': exit status -9"):
        crowd.same("x+1", "1+x", seconds=5.0, size=1)
    assert len(set(deaths)) == 3
    assert crowd.same("x+1", "1+x", seconds=5.0, size=1)
    crowd.close()


def test_a_worker_that_stands_still_is_killed_at_the_deadline(monkeypatch):
    crowd = pool.Pool()
    assert crowd.same("x+1", "1+x", seconds=5.0, size=1)
    (stuck,) = crowd._workers
    stuck.process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(pool, "PATIENCE", 1.0)
    with pytest.raises(GraderError, match="no verdict on '5' against 'x' within 1 s"):
        crowd.same("x", "5", seconds=5.0, size=1)
    monkeypatch.undo()
    assert stuck.process.returncode == -signal.SIGKILL
    assert crowd.same("x+1", "1+x", seconds=5.0, size=1)
    crowd.close()


def test_nobody_waits_for_ever_for_a_free_worker(monkeypatch):
    crowd = pool.Pool()
    crowd.same("1", "1", seconds=5.0, size=1)
    (worker,) = crowd._workers
    taken = crowd._take(1, time.monotonic() + 1)
    monkeypatch.setattr(pool, "PATIENCE", 0.2)
    with pytest.raises(GraderError, match="none of 1 workers was free within 0.2 s"):
        crowd.same("1", "1", seconds=5.0, size=1)
    monkeypatch.undo()
    assert taken is worker
    crowd.close()


def test_two_thousand_gradings_leak_nothing():
    golds, process = math500(), psutil.Process()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda gold: MATH.same(gold, gold), golds[:16]))
        before = ([worker.pid for worker in workers()], process.num_fds())
        verdicts = list(threads.map(lambda i: MATH.same(golds[i % 100], golds[i % 100]), range(2_000)))
        after = ([worker.pid for worker in workers()], process.num_fds())
    assert verdicts.count(True) == 2_000
    assert after == before
    assert max(worker.memory_info().rss for worker in workers()) < 300e6  # 75 MB


SCRIPT = """
import os, sys, time
from rtpo_ray.rewards import pool
def ask(): return pool.shared().same("x+1", "1+x", seconds=5.0, size=1)
def pids(): return sorted(worker.process.pid for worker in pool.shared()._workers)
assert ask()
child = os.fork()
if child == 0:  # its own pool, and the parent's left alone
    assert pids() == [] and ask()
    pool.shared().close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert ask()
print(*pids(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kill", [False, True])
def test_the_workers_end_with_their_process_and_a_fork_has_its_own(kill):
    with subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as process:
        (worker,) = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        if kill:
            process.kill()
        process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if kill else 0)
    psutil.wait_procs([worker], timeout=30)
    assert not worker.is_running()


# the registry

def test_graders_are_built_by_name_and_travel(tmp_path):
    assert list(GRADERS) == ["math", "exact", "f1", "hit", "judge"]
    grader = build({"math": {"gold": "final", "seconds": 2}})
    assert (grader.fields, grader.seconds, grader.instant) == (("final",), 2, False)
    grader.grade("", {"final": 5})
    assert pickle.loads(pickle.dumps(grader)).counts == {"no_answer": 1}
    assert build({"math": None}).fields == ("answer",)
    own = tmp_path / "own.py"
    own.write_text("from rtpo_ray.rewards.base import Grader\nclass Own(Grader):\n    def grade(self, response, row):\n        return 0.5\n")
    assert build(f"{own}:Own").grade("", {}) == 0.5


@pytest.mark.parametrize(("spec", "message"), [
    ("maths", "grader is 'maths'; valid names: math, exact, f1, hit, judge, or file.py:Class"),
    ({"math": {"golds": "x"}}, "the grader 'math' has no option 'golds'; valid options: gold, last_number, seconds, workers"),
    ({"math": {}, "f1": {}}, "expected a name, or a mapping of one name to its options"),
    ({"math": 5}, "options of the grader 'math' are 5; expected a mapping"),
    ({"math": {"seconds": 0}}, "seconds is 0; expected more than 0"),
    ({"math": {"workers": 0}}, "workers is 0; expected at least 1"),
    ({"judge": {"url": "http://x"}}, "the grader 'judge' needs the option 'model'"),
])
def test_a_mistake_in_the_spec_is_named(spec, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        build(spec)


@pytest.mark.parametrize(("response", "gold"), [
    ("#### Step 1: add\n2 + 3 = 5\n#### Final Answer\nThe answer is 5.", "5"), ("#### Conclusion\n\nThe answer is 5", "5"),
    ("#### Final Answer\n5", "5"), ("#### 18 dollars", "18"), ("2 + 3 is 5\n#### Tuesday", "Tuesday"),
    (r"#### \frac{1}{2}", r"\frac{1}{2}"),
    ("The answer is therefore 18", "18"), ("The answer is clearly 18.", "18"), ("The answer is 18 eggs, because 9*2 = 18", "18"),
    (r"\boxed{1\,000}", "1000"), (r"\boxed{1{,}000}", "1000"),
    (r"\boxed{5} or \boxed{}", "5"),
])
def test_headings_adverbs_and_empty_boxes_hide_no_answer(response, gold):
    assert Math().grade(response, {"answer": gold}) == 1.0
    assert Math().grade(response, {"answer": "77"}) == 0.0
