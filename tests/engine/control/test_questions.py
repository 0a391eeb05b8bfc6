from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kfcomm.engine.control.node import Questions


def ask(questions, count, target, first_number=0):
    question = questions.ask([(b"g", f"name {index}", index) for index in range(count)], target, None)
    for part in range(len(question.parts)):
        questions.sent(first_number + part, question, part)
    return question


def replies(question, rank, first_number=0):
    return [(first_number + part, rank, [seq % 3 == 0 for _, _, seq in ops]) for part, ops in enumerate(question.parts)]


@given(st.integers(0, 200), st.randoms(use_true_random=False))
def test_parts_in_any_order_and_twice_make_one_answer(count, random):
    questions = Questions()
    question = ask(questions, count, -1)
    arriving = (replies(question, 1) + replies(question, 2)) * 2
    random.shuffle(arriving)
    whole = [(found, rank) for number, rank, posted in arriving if (found := questions.reply(number, rank, posted))]
    expected = [index % 3 == 0 for index in range(count)]
    assert sorted(rank for _, rank in whole) == [1, 2]
    assert all(found == (question, expected) for found, _ in whole)


def test_asking_again_goes_on_with_what_has_come():
    questions = Questions()
    question = ask(questions, 100, 1)
    assert questions.reply(*replies(question, 1)[0]) is None
    for part in range(len(question.parts)):
        questions.sent(10 + part, question, part)
    found = questions.reply(*replies(question, 1, 10)[1])
    assert found is not None
    assert len(found[1]) == 100


def test_replies_that_fit_nothing_are_ignored():
    questions = Questions()
    ask(questions, 2, 1)
    assert questions.reply(9, 1, [True, True]) is None
    assert questions.reply(0, 2, [True, True]) is None
    assert questions.reply(0, 1, [True]) is None
    assert questions.reply(0, 1, [True, True]) is not None


def test_a_closed_question_is_forgotten():
    questions = Questions()
    first, second = ask(questions, 1, 1, 0), ask(questions, 1, 1, 1)
    assert questions.about(1) == [first, second]
    questions.close(first)
    questions.close(first)
    assert not questions.is_open(first)
    assert questions.is_open(second)
    assert questions.about(1) == [second]
    assert questions.reply(0, 1, [True]) is None
    assert questions.reply(1, 1, [True]) is not None
