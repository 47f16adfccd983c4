import numpy as np
import pytest
from slipstream.extensions.other_models.trainer import explained_variance


def test_explained_variance_tells_perfect_values_from_a_constant() -> None:
    returns = np.array([0.0, 1.0, 2.0, 5.0], dtype=np.float32)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns + 3, returns) == pytest.approx(1.0)
    assert explained_variance(np.full(4, 9.0, dtype=np.float32), returns) == 0.0
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, np.ones(4, dtype=np.float32)) == 0.0
