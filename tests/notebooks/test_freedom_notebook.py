import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs(run_notebook):
    run_notebook("freedom")
