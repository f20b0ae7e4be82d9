import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from words import refused

from dissociation.bilinear import (
    Spectrum,
    form_similarity,
    matched_similarity,
    pair_mean,
    rank_similarity,
    truncate,
)
from dissociation.bilinear._forms import activations
from dissociation.bilinear._similarity import (
    bootstrap_interval,
    member_pairs,
    overlaps,
    student_interval,
)


def spectrum(seed, outputs=2, components=5, width=12):
    rng = np.random.default_rng(seed)
    vectors = np.stack(
        [np.linalg.qr(rng.normal(size=(width, components)))[0].T for _ in range(outputs)]
    )
    values = rng.normal(size=(outputs, components))
    return Spectrum(jnp.asarray(values, jnp.float32), jnp.asarray(vectors, jnp.float32), False)


def permuted(one, order):
    order = jnp.asarray(order)
    return Spectrum(one.values[:, order], -one.vectors[:, order], False)


def test_signs_do_not_matter_and_a_swap_of_ranks_is_seen_by_rank_alone():
    one = spectrum(0)
    np.testing.assert_allclose(rank_similarity(one, permuted(one, range(5))), 1, atol=1e-6)
    swapped = permuted(one, [1, 0, 2, 3, 4])
    assert rank_similarity(one, swapped)[:, :2].max() < 1e-5
    np.testing.assert_allclose(matched_similarity(one, swapped, 5), 1, atol=1e-6)
    np.testing.assert_allclose(form_similarity(one, swapped), 1, atol=1e-6)


def test_matching_is_the_best_of_all_permutations():
    one, other = spectrum(1), spectrum(2)
    tables = np.asarray(overlaps(one, other))[:, :4, :4]
    best = [
        max(sum(t[i, p[i]] for i in range(4)) for p in itertools.permutations(range(4)))
        for t in tables
    ]
    np.testing.assert_allclose(matched_similarity(one, other, 4).sum(1), best, rtol=1e-5)
    assert (np.asarray(rank_similarity(one, other))[:, :4].sum(1) < np.asarray(best)).all()


def test_forms_against_dense_matrices():
    one, other = spectrum(3), spectrum(4)
    cosines = form_similarity(one, other)
    for output in range(2):
        bases = [np.asarray(s.vectors[output], float).T for s in (one, other)]
        forms = [
            b * np.asarray(s.values[output], float) @ b.T
            for b, s in zip(bases, (one, other), strict=True)
        ]
        cosine = np.sum(forms[0] * forms[1]) / np.prod([np.linalg.norm(form) for form in forms])
        np.testing.assert_allclose(cosines[output], cosine, atol=1e-5)
    flipped = Spectrum(-one.values, one.vectors, False)
    np.testing.assert_allclose(
        form_similarity(one, flipped), -1, atol=1e-6
    )  # vectors alone would not see it


def test_pairs_leave_out_members_with_themselves():
    first, second = member_pairs(4)
    assert sorted(zip(first, second, strict=True)) == list(itertools.combinations(range(4), 2))
    first, second = member_pairs(2, 3)
    assert sorted(zip(first, second, strict=True)) == list(itertools.product(range(2), range(3)))


def test_bootstrap_over_members_is_wider_than_over_pairs():
    # Effects of members make pairs that share one alike: intervals over pairs are too short, those
    # over members hold.
    members, trials, covered, short = 8, 60, 0, 0
    first, second = member_pairs(members)
    run = jax.jit(
        lambda table, key: bootstrap_interval(pair_mean(table, first, second), (members,), key=key)
    )
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        effects = rng.normal(size=members)
        table = (effects[first] + effects[second] + 0.1 * rng.normal(size=len(first))).astype(
            np.float32
        )
        interval = run(table, jax.random.key(seed))
        covered += bool(interval.low <= 0 <= interval.high)
        naive = student_interval(table)
        short += bool(naive.low <= 0 <= naive.high)
        known = scipy.stats.t.interval(
            0.9, len(table) - 1, loc=table.mean(), scale=scipy.stats.sem(table)
        )
        np.testing.assert_allclose([naive.low, naive.high], known, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(interval.mean, table.mean(), atol=1e-5)
    # 90 % wanted; percentile intervals of 8 members fall a little short of it, those over pairs
    # far.
    assert covered >= 0.75 * trials
    assert short <= 0.65 * trials


def test_both_ends_of_the_bootstrap_are_its_percentiles():
    # The mean of many members is normal: its percentiles are known, within the error of a
    # percentile of 4000 draws.
    values = jnp.asarray(np.random.default_rng(0).normal(size=200), jnp.float32)
    mean = lambda weights: weights @ values / weights.sum()  # noqa: E731
    level = 0.5
    options = {"key": jax.random.key(1), "level": level, "num_resamples": 4000}
    found = bootstrap_interval(mean, (200,), **options)
    error = float(values.std()) / 200**0.5
    end = scipy.stats.norm.ppf(0.5 + 0.5 * level)
    slack = 4 * (0.25 * (1 - level**2) / 4000) ** 0.5 / scipy.stats.norm.pdf(end)
    np.testing.assert_allclose((found.high - found.mean) / error, end, atol=slack)
    np.testing.assert_allclose((found.mean - found.low) / error, end, atol=slack)


def test_bad_input_is_refused():
    one, other = spectrum(0), spectrum(1)
    constant = Spectrum(one.values, one.vectors, True)
    refused(
        (lambda: overlaps(one, spectrum(0, width=13)), "outputs and width of `a`"),
        (lambda: overlaps(one, constant), "`b` must have `constant="),
        (lambda: matched_similarity(one, other, 6), "`num_components` must be at most 5"),
    )


def test_a_stack_of_spectra_is_mapped_over_or_refused():
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *map(spectrum, range(3)))
    for call in (
        lambda s: truncate(s, 1),
        lambda s: activations(s, np.ones((2, 12), np.float32)),
        lambda s: matched_similarity(s, s, 2),
    ):
        with pytest.raises(
            ValueError, match=r"one spectrum, of values \[outputs, components\], got shape \(3, "
        ):
            call(stacked)
        found = eqx.filter_jit(eqx.filter_vmap(call))(stacked)
        alone = eqx.filter_jit(call)(spectrum(1))
        for one, own in zip(*map(jax.tree.leaves, (found, alone)), strict=True):
            np.testing.assert_allclose(one[1], own, atol=1e-5)


def test_members_out_of_range_are_refused_or_undefined():
    first, second = member_pairs(4)
    mean = pair_mean(np.ones(6, np.float32), first, second)
    assert mean(jnp.ones(4)) == 1
    refused(
        (
            lambda: mean(jnp.ones(3)),
            "`second` must hold members below 3, the number of weights, got 3",
        ),
        (
            lambda: pair_mean(np.ones(6, np.float32), first - 1, second),
            "`first` must hold members counted from 0",
        ),
    )
    traced = jax.jit(lambda f, s, w: pair_mean(np.ones(6, np.float32), f, s)(w))
    assert traced(first, second, jnp.ones(4)) == 1
    assert np.isnan(traced(first, second, jnp.ones(3)))


def test_an_undefined_member_leaves_no_interval():
    first, second = member_pairs(5)
    values = np.where((first == 0) | (second == 0), np.nan, 1.0).astype(np.float32)
    table = np.stack([values, np.ones(10, np.float32)], 1)
    interval = bootstrap_interval(pair_mean(table, first, second), (5,), key=jax.random.key(0))
    np.testing.assert_array_equal(np.stack(interval), [[np.nan, 1]] * 3)
