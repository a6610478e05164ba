from integrations.easyocr.scoring import Score, score


def test_accuracy_and_normalised_edit_distance():
    found = score(["abc", "abd", ""], ["abc", "abc", "xy"])
    assert found.accuracy == 1 / 3
    assert abs(found.similarity - (1 + 2 / 3 + 0) / 3) < 1e-12
    assert score([], []) == Score(0.0, 0.0, 0)


def test_better_is_accuracy_first_then_similarity():
    assert Score(0.5, 0.6, 9).better_than(None)
    assert Score(0.5, 0.7, 9).better_than(Score(0.5, 0.6, 9))
    assert not Score(0.5, 0.6, 9).better_than(Score(0.5, 0.6, 9))
    assert Score(0.6, 0.1, 9).better_than(Score(0.5, 0.9, 9))
