"""Solvers of the softmax probes of all folds, by L-BFGS or gradient steps."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dissociation._core.results import printed

# The softmax of a class that a fold's training part does not hold is exactly zero.
_NEVER = -1e30
# Number of stored pairs of changes, and the steps before which the metric is recomputed.
_MEMORY = 8
_REFRESH = (0, 8, 24, 72, 216, 648)


class SoftmaxFit(NamedTuple):
    """Converged softmax probes of all folds.

    Attributes:
        probabilities: Held-out class probabilities in the order of the samples, zero past
            `num_samples`.
        coefficients: Matrices per fold for raw features: logits are `x @ coefficients[f] +
            intercepts[f]`.
        intercepts: Intercepts per fold, minus infinity for classes that the training part lacks.
        losses: Minimised objective per fold, with the penalty.
        gradient_norm: Norm of the objective's gradient per fold, in standardised coordinates.
        gap: `gradient_norm**2 / (2 * ridge * loss)` per fold, usually at least (loss - minimum) /
            loss.
        converged: True if `gap` is at most `tol`, per fold.
        iterations: Quasi-Newton steps of the slowest fold, each with two products with the data.
    """

    probabilities: Float[Array, "n classes"]
    coefficients: Float[Array, "folds d classes"]
    intercepts: Float[Array, "folds classes"]
    losses: Float[Array, " folds"]
    gradient_norm: Float[Array, " folds"]
    gap: Float[Array, " folds"]
    converged: Bool[Array, " folds"]
    iterations: Int[Array, ""]

    __repr__ = printed


def fold_of_samples(
    labels: Array,
    num_splits: int,
    count: Array,
    key: Array | None,
    folds: str,
    groups: Array | None = None,
) -> Array:
    """Return the fold of each sample, by the given or a shuffled order; `num_splits` past `count`.

    A group, numbered in the order of its first sample, is in the fold that its first sample has
    among such samples.
    """
    index = jnp.arange(labels.shape[0], dtype=jnp.int32)
    if groups is not None:
        first = jax.ops.segment_min(index, groups, num_segments=len(index))[groups]
        leads = first == index
        # The first samples of groups come first, in their order.
        order = jnp.argsort(~leads, stable=True)
        fold = fold_of_samples(
            labels[order], num_splits, jnp.sum(leads & (index < count)), key, folds
        )
        return jnp.where(
            index < count, jnp.zeros_like(index).at[order].set(fold)[first], num_splits
        )
    used, place = index < count, index
    if key is not None:
        place = _ranks(jnp.where(used, jax.random.uniform(key, labels.shape), 2.0))
    if folds == "stratified":
        # Distributed class by class, so that folds differ by one sample at most, in each class and
        # in all.
        fold = _ranks(place, jnp.where(used, labels, jnp.iinfo(labels.dtype).max)) % num_splits
    else:
        short, longer = count // num_splits, count % num_splits
        border = longer * (short + 1)
        fold = jnp.where(
            place < border, place // (short + 1), longer + (place - border) // jnp.maximum(short, 1)
        )
    return jnp.where(used, fold, num_splits)


def _ranks(*keys: Array) -> Array:
    """Return the rank of every entry; the last key decides first."""
    return jnp.argsort(jnp.lexsort(keys)).astype(jnp.int32)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _dot(a: Array, b: Array) -> Array:
    """Return the inner products of [folds, classes, d] arrays, fold by fold."""
    return jnp.sum(a * b, (1, 2))


class _Problem(NamedTuple):
    """Softmax regressions of all folds: weights [folds, classes, d + 1], intercept last; logits [folds, classes, n]."""

    # A fold is a mask, and standardisation is folded into weights, so one product gives all folds'
    # logits. With the long axes innermost, exponentials and sums over classes are vector
    # instructions.
    data: Array  # [n, d + 1], centred and scaled over all samples; a column of ones
    labels: Array  # [classes, n]
    mask: Array  # [folds, 1, n], 1 on the training part
    offset: Array  # [folds, classes, 1], 0 or _NEVER
    scale: Array  # [folds, 1, d + 1], inverse deviation in the training part; 0 if constant
    mean: Array  # [folds, 1, d + 1], mean in the training part; 0 for the intercept
    penalty: Array  # [1, 1, d + 1], ridge; 0 for the intercept

    def plain(self, weights: Array) -> Array:
        """Return weights for `data` from weights for each fold's standardised features."""
        plain = self.scale * weights
        return plain.at[:, :, -1].add(-jnp.sum(self.mean * plain, -1))

    def logits(self, weights: Array) -> Array:
        plain = self.plain(weights)
        return _product(plain.reshape(-1, plain.shape[-1]), self.data.T).reshape(
            *plain.shape[:2], -1
        )

    def pull_back(self, residual: Array) -> Array:
        """Return the adjoint of `logits`."""
        plain = _product(residual.reshape(-1, residual.shape[-1]), self.data).reshape(
            *residual.shape[:2], -1
        )
        return self.scale * (plain - self.mean * plain[:, :, -1:])

    def probabilities(self, logits: Array) -> Array:
        return jax.nn.softmax(logits + self.offset, 1)

    def residual(self, chances: Array) -> Array:
        # 1 - p of the true class as the sum of the others, because the difference loses its digits
        # if p is close to 1.
        others = chances * (1.0 - self.labels[None])
        return self.mask * (others - self.labels[None] * jnp.sum(others, 1, keepdims=True))

    def value(self, logits: Array, weights: Array) -> Array:
        shifted = logits + self.offset
        true = jnp.sum(shifted * self.labels[None], 1, keepdims=True)
        others = jax.nn.logsumexp(jnp.where(self.labels[None] > 0, -jnp.inf, shifted - true), 1)
        return jnp.sum(self.mask[:, 0] * jax.nn.softplus(others), -1) + 0.5 * _dot(
            self.penalty * weights, weights
        )

    def gradient(self, chances: Array, weights: Array) -> Array:
        return self.pull_back(self.residual(chances)) + self.penalty * weights


def _fold_masks(ids: Array, num_splits: int, dtype: jnp.dtype) -> Array:
    folds = jnp.arange(num_splits, dtype=ids.dtype)
    return ((ids[None, :] < num_splits) & (ids[None, :] != folds[:, None])).astype(dtype)


def _held_out(probabilities: Array, ids: Array) -> Array:
    """Return each sample's row by the fold that holds it out, zero for samples in no fold."""
    mine = ids[None, :] == jnp.arange(probabilities.shape[0], dtype=ids.dtype)[:, None]
    return jnp.sum(probabilities, 0, where=mine[:, None]).T


def _standardise(x: Array, ids: Array, num_splits: int) -> tuple[Array, Array, Array, Array]:
    """Return data standardised over the samples in use, with a column of ones, their mean, deviation and rounding."""
    used = (ids < num_splits)[:, None]
    count = jnp.sum(used).astype(x.dtype)
    x = jnp.where(used, x, 0.0)
    # In units of a power of two, which changes no digit: squares neither overflow nor vanish.
    units = jnp.frexp(jnp.max(jnp.abs(x), 0))[1]
    x = jnp.ldexp(x, -units[None])
    mean = jnp.sum(x, 0) / count
    # The rounding of a mean far from zero is subtracted too.
    rest = jnp.sum(jnp.where(used, x - mean[None], 0.0), 0) / count
    centred = jnp.where(used, (x - mean[None]) - rest[None], 0.0)
    rounding = 4 * jnp.finfo(x.dtype).eps * jnp.max(jnp.abs(x), 0)
    deviation = jnp.sqrt(jnp.sum(centred**2, 0) / count)
    # Standardising a column that varies by rounding alone would amplify the rounding.
    deviation = jnp.where(_range(centred, used) <= rounding, 0.0, deviation)
    scale = jnp.where(deviation > 0, 1.0 / deviation, 0.0)
    data = jnp.concatenate([centred * scale[None], jnp.ones((x.shape[0], 1), x.dtype)], 1)
    return (
        data,
        jnp.ldexp(mean + rest, units),
        jnp.ldexp(deviation, units),
        jnp.append(rounding * scale, 0.0),
    )


def _range(data: Array, chosen: Array) -> Array:
    return jnp.max(data, 0, where=chosen, initial=-jnp.inf) - jnp.min(
        data, 0, where=chosen, initial=jnp.inf
    )


def build(
    x: Array, y: Array, ids: Array, ridge: Array, num_splits: int
) -> tuple[_Problem, Array, Array]:
    """Return the regressions of all folds, and the mean and deviation that convert coefficients to raw features."""
    data, mean, deviation, rounding = _standardise(x, ids, num_splits)
    mask = _fold_masks(ids, num_splits, x.dtype)

    def moments(weights: Array) -> tuple[Array, Array]:
        average = _product(weights, data) / jnp.sum(weights)
        variance = _product(weights, (data - average[None]) ** 2) / jnp.sum(weights)
        # By the range, because a feature that differs in one sample has a small variance too.
        constant = _range(data, weights[:, None] > 0) <= rounding
        return average, jnp.where(constant, 0.0, lax.rsqrt(jnp.where(constant, 1.0, variance)))

    average, scale = lax.map(moments, mask)
    average, scale = average.at[:, -1].set(0.0), scale.at[:, -1].set(1.0)
    penalty = jnp.full((data.shape[1],), ridge).at[-1].set(0.0)
    rows = scale[:, None], average[:, None], penalty[None, None]
    offset = jnp.where(_product(mask, y) > 0, 0.0, _NEVER).astype(x.dtype)[:, :, None]
    return _Problem(data, y.T, mask[:, None], offset, *rows), mean, deviation


def inverse(matrix: Array, block: int = 64) -> Array:
    """Return the inverse of a positive definite matrix by Gauss-Jordan elimination in blocks."""
    # By products, because the threads of LAPACK's Cholesky wait for each other for seconds on a
    # busy machine.
    size = matrix.shape[0]
    block = min(block, size)
    extra = jnp.arange(size, size + -size % block)
    matrix = jnp.pad(matrix, (0, len(extra))).at[extra, extra].set(1.0)

    def eliminate(index, matrix):
        start = index * block
        rows = lax.dynamic_slice_in_dim(matrix, start, block, 0)
        pivot = lax.dynamic_slice_in_dim(rows, start, block, 1)
        pivot = 1.0 / pivot if block == 1 else inverse(pivot, 1)
        rows = _product(
            pivot, lax.dynamic_update_slice_in_dim(rows, jnp.eye(block, dtype=rows.dtype), start, 1)
        )
        columns = lax.dynamic_slice_in_dim(matrix, start, block, 1)
        columns = lax.dynamic_update_slice_in_dim(
            columns, jnp.zeros((block, block), rows.dtype), start, 0
        )
        matrix = lax.dynamic_update_slice_in_dim(matrix, jnp.zeros_like(columns), start, 1)
        return lax.dynamic_update_slice_in_dim(matrix - _product(columns, rows), rows, start, 0)

    matrix = lax.fori_loop(0, matrix.shape[0] // block, eliminate, matrix)[:size, :size]
    return 0.5 * (matrix + matrix.T)


def _metric(problem: _Problem, chances: Array) -> Array:
    """Return the inverse of the mean curvature of folds and classes, with samples weighted by their mean p (1 - p)."""
    weight = jnp.mean(problem.mask * chances * (1.0 - chances), (0, 1))
    gram = _product((problem.data * weight[:, None]).T, problem.data)
    # With a ridge below the rounding of the Gram matrix, the inverse would not be positive
    # definite. With one far below the curvature, the metric would be wrong after a few steps, when
    # the curvature has fallen.
    floor = 3e-5 * jnp.trace(gram)
    return inverse(gram + jnp.diag(jnp.maximum(problem.penalty[0, 0], floor)))


class _Pairs(NamedTuple):
    """Latest changes of weights and gradient, [_MEMORY, folds, classes, d + 1]."""

    weights: Array
    gradient: Array
    inverse: Array  # [_MEMORY, folds], inverse of their inner product; 0 for an unused pair

    def add(self, visit: Array, weights: Array, gradient: Array) -> "_Pairs":
        inner = _dot(weights, gradient)
        good = inner > jnp.finfo(inner.dtype).eps * jnp.sqrt(
            _dot(weights, weights) * _dot(gradient, gradient)
        )
        inverse = jnp.where(good, 1.0 / jnp.where(good, inner, 1.0), 0.0)
        slot = visit % _MEMORY
        return _Pairs(
            *(
                old.at[slot].set(new)
                for old, new in zip(self, (weights, gradient, inverse), strict=True)
            )
        )

    def forget(self, folds: Array) -> "_Pairs":
        """Clear the memory of some folds."""
        return self._replace(inverse=jnp.where(folds[None], 0.0, self.inverse))

    def descend(self, visit: Array, gradient: Array, metric: Array) -> Array:
        """Return the quasi-Newton step from `gradient`, by the two loops of L-BFGS around `metric`."""

        def shape(vector):
            return _product(vector.reshape(-1, vector.shape[-1]), metric).reshape(vector.shape)

        def newest_first(age, state):
            vector, amounts = state
            slot = (visit - age) % _MEMORY
            amount = self.inverse[slot] * _dot(self.weights[slot], vector)
            return vector - amount[:, None, None] * self.gradient[slot], amounts.at[slot].set(
                amount
            )

        def oldest_first(age, vector):
            slot = (visit + 1 + age) % _MEMORY
            amount = amounts[slot] - self.inverse[slot] * _dot(self.gradient[slot], vector)
            return vector + amount[:, None, None] * self.weights[slot]

        vector, amounts = lax.fori_loop(
            0, _MEMORY, newest_first, (gradient, jnp.zeros_like(self.inverse))
        )
        last, inverse = self.gradient[visit % _MEMORY], self.inverse[visit % _MEMORY]
        length = inverse * _dot(last, shape(last))
        scale = jnp.where(length > 0, 1.0 / jnp.where(length > 0, length, 1.0), 1.0)
        return -lax.fori_loop(0, _MEMORY, oldest_first, scale[:, None, None] * shape(vector))


def _line_search(
    problem: _Problem,
    logits: Array,
    change: Array,
    weights: Array,
    step: Array,
    value,
    slope,
    active,
):
    """Return each fold's step length: 1, or shorter by secants of the slope; 0 for inactive folds or after 25 trials.

    A length is accepted if the value falls enough, and the slope there is at most minus half of the
    negative `slope`.
    """
    # Near the minimum values differ by less than their rounding, hence the slack and the condition
    # on the slope. Logits are linear in the length, so trials do not need the data.
    slack = 8 * jnp.finfo(logits.dtype).eps * jnp.abs(value)

    def body(state):
        length, on, count = state
        there = logits + length[:, None, None] * change
        moved = weights + length[:, None, None] * step
        residual = problem.residual(problem.probabilities(there))
        new_slope = _dot(residual, change) + _dot(problem.penalty * moved, step)
        lower = problem.value(there, moved) <= value + 1e-4 * length * slope + slack
        done = lower & (new_slope <= -0.5 * slope)
        shorter = length * jnp.clip(
            -slope / jnp.where(new_slope > slope, new_slope - slope, 1.0), 0.1, 0.7
        )
        return jnp.where(on & ~done, shorter, length), on & ~done, count + 1

    start = active.astype(logits.dtype), active, 0
    length, failed, _ = lax.while_loop(
        lambda state: jnp.any(state[1]) & (state[2] < 25), body, start
    )
    return jnp.where(failed, 0.0, length)


class _State(NamedTuple):
    """State of `minimise`. A round computes the gradient at `weights`, then steps."""

    weights: Array  # [folds, classes, d + 1]
    logits: Array  # [folds, classes, n], at `weights`, without the offset
    past_weights: Array  # of the last round, which computed the next three
    past_gradient: Array
    value: Array  # [folds], loss
    square: Array  # [folds], squared norm of the gradient
    pairs: _Pairs
    metric: Array  # [d + 1, d + 1]
    active: Array  # [folds]
    restart: Array  # True if the next round computes the metric, because a fold lost its pairs
    visits: Array  # number of rounds; the last one takes no step


def minimise(
    x: Array, y: Array, ids: Array, ridge: Array, tol: Array, *, num_splits: int, limit: int
) -> SoftmaxFit:
    """Return the fits of all folds, by L-BFGS with at most `limit` steps in a metric that the folds share.

    `ids`: Fold that holds out each sample, [n]; `num_splits` for samples that are not in use.
    """
    problem, mean, deviation = build(x, y, ids, ridge, num_splits)

    def body(state):
        weights, logits, visit = state.weights, state.logits, state.visits
        chances = problem.probabilities(logits)
        gradient, value = problem.gradient(chances, weights), problem.value(logits, weights)
        square = _dot(gradient, gradient)
        # The last round takes no step, so value and gradient are those of the final weights.
        active = state.active & (square > 2 * ridge * tol * value) & (visit < limit)
        pairs = state.pairs.add(visit, weights - state.past_weights, gradient - state.past_gradient)
        due = (jnp.any(visit == jnp.asarray(_REFRESH)) | state.restart) & jnp.any(active)
        metric = lax.cond(due, lambda: _metric(problem, chances), lambda: state.metric)
        step = jnp.where(active[:, None, None], pairs.descend(visit, gradient, metric), 0.0)
        change, slope = problem.logits(step), _dot(gradient, step)
        length = _line_search(
            problem, logits, change, weights, step, value, slope, active & (slope < 0)
        )
        moved, logits = (
            weights + length[:, None, None] * step,
            logits + length[:, None, None] * change,
        )
        # Without a length, a fold tries again without pairs and with a new metric. If it had both,
        # rounding limits it.
        stuck = active & (length == 0)
        again = stuck & (jnp.any(pairs.inverse > 0, 0) | ~due)
        pairs, active = pairs.forget(again), active & (again | ~stuck)
        return _State(
            moved,
            logits,
            weights,
            gradient,
            value,
            square,
            pairs,
            metric,
            active,
            jnp.any(again),
            visit + 1,
        )

    shape, size = (num_splits, y.shape[1]), x.shape[1] + 1
    zero, weights = jnp.zeros((num_splits,), x.dtype), jnp.zeros((*shape, size), x.dtype)
    ring = jnp.zeros((_MEMORY, *weights.shape), x.dtype)
    state = _State(
        weights=weights,
        logits=jnp.zeros((*shape, x.shape[0]), x.dtype),
        past_weights=weights,
        past_gradient=weights,
        value=zero,
        square=zero,
        pairs=_Pairs(ring, ring, jnp.zeros((_MEMORY, num_splits), x.dtype)),
        metric=jnp.zeros((size, size), x.dtype),
        active=jnp.ones((num_splits,), bool),
        restart=jnp.asarray(False),
        visits=jnp.asarray(0),
    )
    state = lax.while_loop(
        lambda state: jnp.any(state.active) & (state.visits <= limit), body, state
    )
    gap = state.square / (2 * ridge * state.value)
    raw = problem.plain(state.weights)
    coefficients = raw[:, :, :-1] * jnp.where(deviation > 0, 1.0 / deviation, 0.0)[None, None]
    intercepts = raw[:, :, -1] - jnp.sum(mean[None, None] * coefficients, -1)
    return SoftmaxFit(
        probabilities=_held_out(problem.probabilities(state.logits), ids),
        coefficients=jnp.swapaxes(coefficients, 1, 2),
        intercepts=jnp.where(problem.offset[:, :, 0] < 0, -jnp.inf, intercepts),
        losses=state.value,
        gradient_norm=jnp.sqrt(state.square),
        gap=gap,
        converged=gap <= tol,
        iterations=state.visits - 1,
    )


def largest_eigenvalue(data: Array) -> Array:
    """Return the largest eigenvalue of `data.T @ data`, by 50 power iterations from the mean of the rows."""

    def body(_, vector):
        vector = _product(_product(data, vector), data)
        return vector / jnp.linalg.norm(vector)

    largest = jnp.max(jnp.abs(data))
    data = data / largest  # squares of sums do not overflow
    first = jnp.mean(data, 0)
    vector = lax.fori_loop(0, 50, body, first / jnp.linalg.norm(first))
    return jnp.sum(_product(data, vector) ** 2) * largest**2


def descend_fixed(
    x: Array, y: Array, ids: Array, num_steps: Array, step_size: Array, *, num_splits: int
) -> Array:
    """Return held-out probabilities after gradient steps; a `step_size` of zero means the stable step of each fold."""
    data = jnp.where(
        (ids < num_splits)[:, None],
        jnp.concatenate([x, jnp.ones((x.shape[0], 1), x.dtype)], 1),
        0.0,
    )
    mask = _fold_masks(ids, num_splits, x.dtype)
    # Gradients are those of sums of losses. One bound on the curvature holds for every fold,
    # because its training samples are a subset. `step_size` is for the mean loss, so it is divided
    # by the number of training samples.
    bound = 0.5 * largest_eigenvalue(data)
    rate = jnp.where(step_size > 0, step_size / jnp.sum(mask, 1), 1.0 / bound)[:, None, None]
    one = jnp.ones((1, 1, 1), x.dtype)
    problem = _Problem(
        data, y.T, mask[:, None], jnp.zeros_like(one), one, jnp.zeros_like(one), jnp.zeros_like(one)
    )

    def body(_, weights):
        return weights - rate * problem.pull_back(
            problem.residual(problem.probabilities(problem.logits(weights)))
        )

    weights = lax.fori_loop(
        0, num_steps, body, jnp.zeros((num_splits, y.shape[1], data.shape[1]), x.dtype)
    )
    return _held_out(problem.probabilities(problem.logits(weights)), ids)
