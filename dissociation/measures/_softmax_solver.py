"""Solvers of the softmax probes of all folds, by L-BFGS or gradient steps."""

from typing import Any, NamedTuple

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
    """Return the fold of each sample, in their order or a shuffled one; `num_splits` past `count`.

    A group, numbered in the order of its first sample, is in the fold that its first sample has
    among such samples.
    """
    index = jnp.arange(len(labels), dtype=jnp.int32)
    is_used = index < count
    if groups is not None:
        first = jax.ops.segment_min(index, groups, num_segments=len(index))[groups]
        is_first = first == index
        # The first samples of groups come first, in their order.
        order = jnp.argsort(~is_first, stable=True)
        num_groups = jnp.sum(is_first & is_used)
        fold_in_order = fold_of_samples(labels[order], num_splits, num_groups, key, folds)
        fold = jnp.zeros_like(index).at[order].set(fold_in_order)
        return jnp.where(is_used, fold[first], num_splits)

    position = index
    if key is not None:
        draws = jax.random.uniform(key, labels.shape)
        position = _ranks(jnp.where(is_used, draws, 2.0))

    if folds == "stratified":
        # Distributed class by class, so that folds differ by one sample at most, in each class and
        # in all.
        unused_last = jnp.where(is_used, labels, jnp.iinfo(labels.dtype).max)
        fold = _ranks(position, unused_last) % num_splits
    else:
        size = count // num_splits
        num_longer = count % num_splits
        border = num_longer * (size + 1)
        shorter_fold = num_longer + (position - border) // jnp.maximum(size, 1)
        fold = jnp.where(position < border, position // (size + 1), shorter_fold)
    return jnp.where(is_used, fold, num_splits)


def _ranks(*keys: Array) -> Array:
    """Return the rank of every entry; the last key decides first."""
    return jnp.argsort(jnp.lexsort(keys)).astype(jnp.int32)


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _product_of_rows(array: Array, matrix: Array) -> Array:
    """Return the product of the last axis of an array with a matrix, as one matrix product."""
    rows = array.reshape(-1, array.shape[-1])
    products = _product(rows, matrix)
    return products.reshape(*array.shape[:-1], -1)


def _dot(a: Array, b: Array) -> Array:
    """Return the inner products of [folds, classes, d] arrays, fold by fold."""
    return jnp.sum(a * b, (1, 2))


class _Problem(NamedTuple):
    """Softmax regressions of all folds.

    Weights are [folds, classes, d + 1], with the intercept last, and logits [folds, classes, n].
    """

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
        intercepts = -jnp.sum(self.mean * plain, -1)
        return plain.at[:, :, -1].add(intercepts)

    def logits(self, weights: Array) -> Array:
        return _product_of_rows(self.plain(weights), self.data.T)

    def pull_back(self, residual: Array) -> Array:
        """Return the adjoint of `logits`."""
        plain = _product_of_rows(residual, self.data)
        return self.scale * (plain - self.mean * plain[:, :, -1:])

    def probabilities(self, logits: Array) -> Array:
        return jax.nn.softmax(logits + self.offset, 1)

    def residual(self, probabilities: Array) -> Array:
        # 1 - p of the true class as the sum of the others, because the difference loses its digits
        # if p is close to 1.
        labels = self.labels[None]
        wrong = probabilities * (1.0 - labels)
        true = jnp.sum(wrong, 1, keepdims=True)
        return self.mask * (wrong - labels * true)

    def value(self, logits: Array, weights: Array) -> Array:
        labels = self.labels[None]
        shifted = logits + self.offset
        true_logit = jnp.sum(shifted * labels, 1, keepdims=True)
        excess = jnp.where(labels > 0, -jnp.inf, shifted - true_logit)
        losses = jax.nn.softplus(jax.nn.logsumexp(excess, 1))
        loss = jnp.sum(self.mask[:, 0] * losses, -1)
        return loss + 0.5 * _dot(self.penalty * weights, weights)

    def gradient(self, probabilities: Array, weights: Array) -> Array:
        residual = self.residual(probabilities)
        return self.pull_back(residual) + self.penalty * weights


def _fold_masks(ids: Array, num_splits: int, dtype: jnp.dtype) -> Array:
    ids = ids[None, :]
    folds = jnp.arange(num_splits, dtype=ids.dtype)[:, None]
    is_training = (ids < num_splits) & (ids != folds)
    return is_training.astype(dtype)


def _held_out(probabilities: Array, ids: Array) -> Array:
    """Return each sample's row by the fold that holds it out, zero for samples in no fold."""
    folds = jnp.arange(len(probabilities), dtype=ids.dtype)
    is_held_out = ids[None, :] == folds[:, None]
    return jnp.sum(probabilities, 0, where=is_held_out[:, None]).T


def with_ones(x: Any) -> Array:
    """Return the samples with a column of ones, for the intercept."""
    ones = jnp.ones((len(x), 1), x.dtype)
    return jnp.concatenate([x, ones], 1)


def _standardise(x: Array, ids: Array, num_splits: int) -> tuple[Array, Array, Array, Array]:
    """Return data standardised over the samples in use, with a column of ones.

    The mean, the deviation and the relative rounding of the columns follow.
    """
    is_used = (ids < num_splits)[:, None]
    count = jnp.sum(is_used).astype(x.dtype)
    x = jnp.where(is_used, x, 0.0)
    # In units of a power of two, which changes no digit: squares neither overflow nor vanish.
    _, units = jnp.frexp(jnp.max(jnp.abs(x), 0))
    x = jnp.ldexp(x, -units[None])

    mean = jnp.sum(x, 0) / count
    # The rounding of a mean far from zero is subtracted too.
    centred = x - mean[None]
    remainder = jnp.sum(jnp.where(is_used, centred, 0.0), 0) / count
    centred = jnp.where(is_used, centred - remainder[None], 0.0)
    mean = jnp.ldexp(mean + remainder, units)

    eps = jnp.finfo(x.dtype).eps
    rounding = 4 * eps * jnp.max(jnp.abs(x), 0)
    deviation = jnp.sqrt(jnp.sum(centred**2, 0) / count)
    # Standardising a column that varies by rounding alone would amplify the rounding.
    is_constant = _range(centred, is_used) <= rounding
    deviation = jnp.where(is_constant, 0.0, deviation)
    scale = jnp.where(deviation > 0, 1.0 / deviation, 0.0)
    data = with_ones(centred * scale[None])
    rounding = jnp.append(rounding * scale, 0.0)
    return data, mean, jnp.ldexp(deviation, units), rounding


def _range(data: Array, is_used: Array) -> Array:
    largest = jnp.max(data, 0, where=is_used, initial=-jnp.inf)
    return largest - jnp.min(data, 0, where=is_used, initial=jnp.inf)


def build(
    x: Array, y: Array, ids: Array, ridge: Array, num_splits: int
) -> tuple[_Problem, Array, Array]:
    """Return the regressions of all folds, and the mean and deviation of the raw features."""
    data, mean, deviation, rounding = _standardise(x, ids, num_splits)
    mask = _fold_masks(ids, num_splits, x.dtype)

    def moments(weights):
        average = _product(weights, data) / jnp.sum(weights)
        squares = (data - average[None]) ** 2
        variance = _product(weights, squares) / jnp.sum(weights)
        # By the range, because a feature that differs in one sample has a small variance too.
        is_constant = _range(data, weights[:, None] > 0) <= rounding
        variance = jnp.where(is_constant, 1.0, variance)
        return average, jnp.where(is_constant, 0.0, lax.rsqrt(variance))

    average, scale = lax.map(moments, mask)
    average = average.at[:, -1].set(0.0)
    scale = scale.at[:, -1].set(1.0)
    penalty = jnp.full((data.shape[1],), ridge)
    penalty = penalty.at[-1].set(0.0)
    has_class = _product(mask, y) > 0
    offset = jnp.where(has_class, 0.0, _NEVER).astype(x.dtype)
    problem = _Problem(
        data,
        y.T,
        mask[:, None],
        offset[:, :, None],
        scale[:, None],
        average[:, None],
        penalty[None, None],
    )
    return problem, mean, deviation


def inverse(matrix: Array, block: int = 64) -> Array:
    """Return the inverse of a positive definite matrix by Gauss-Jordan elimination in blocks."""
    # By products, because the threads of LAPACK's Cholesky wait for each other for seconds on a
    # busy machine.
    size = len(matrix)
    block = min(block, size)
    padding = jnp.arange(size, size + -size % block)
    matrix = jnp.pad(matrix, (0, len(padding)))
    matrix = matrix.at[padding, padding].set(1.0)
    slice_of = lax.dynamic_slice_in_dim
    update = lax.dynamic_update_slice_in_dim

    def eliminate(index, matrix):
        start = index * block
        rows = slice_of(matrix, start, block, 0)
        pivot = slice_of(rows, start, block, 1)
        inverse_pivot = 1.0 / pivot if block == 1 else inverse(pivot, 1)
        identity = jnp.eye(block, dtype=rows.dtype)
        rows = update(rows, identity, start, 1)
        rows = _product(inverse_pivot, rows)

        columns = slice_of(matrix, start, block, 1)
        columns = update(columns, jnp.zeros_like(pivot), start, 0)
        matrix = update(matrix, jnp.zeros_like(columns), start, 1)
        return update(matrix - _product(columns, rows), rows, start, 0)

    matrix = lax.fori_loop(0, len(matrix) // block, eliminate, matrix)
    matrix = matrix[:size, :size]
    return 0.5 * (matrix + matrix.T)


def _metric(problem: _Problem, probabilities: Array) -> Array:
    """Return the inverse of the mean curvature of folds and classes.

    Samples are weighted by their mean p (1 - p).
    """
    weight = jnp.mean(problem.mask * probabilities * (1.0 - probabilities), (0, 1))
    weighted = problem.data * weight[:, None]
    gram = _product(weighted.T, problem.data)
    # With a ridge below the rounding of the Gram matrix, the inverse would not be positive
    # definite. With one far below the curvature, the metric would be wrong after a few steps, when
    # the curvature has fallen.
    floor = 3e-5 * jnp.trace(gram)
    penalty = jnp.maximum(problem.penalty[0, 0], floor)
    return inverse(gram + jnp.diag(penalty))


class _Pairs(NamedTuple):
    """Latest changes of weights and gradient, [_MEMORY, folds, classes, d + 1]."""

    weights: Array
    gradient: Array
    inverse: Array  # [_MEMORY, folds], inverse of their inner product; 0 for an unused pair

    def add(self, visit: Array, weights: Array, gradient: Array) -> "_Pairs":
        inner = _dot(weights, gradient)
        squares = _dot(weights, weights) * _dot(gradient, gradient)
        is_usable = inner > jnp.finfo(inner.dtype).eps * jnp.sqrt(squares)
        inner = jnp.where(is_usable, inner, 1.0)
        inverse = jnp.where(is_usable, 1.0 / inner, 0.0)
        slot = visit % _MEMORY
        return _Pairs(
            self.weights.at[slot].set(weights),
            self.gradient.at[slot].set(gradient),
            self.inverse.at[slot].set(inverse),
        )

    def forget(self, folds: Array) -> "_Pairs":
        """Clear the memory of some folds."""
        return self._replace(inverse=jnp.where(folds[None], 0.0, self.inverse))

    def descend(self, visit: Array, gradient: Array, metric: Array) -> Array:
        """Return the quasi-Newton step, by the two loops of L-BFGS around `metric`."""

        def newest_first(age, state):
            vector, amounts = state
            slot = (visit - age) % _MEMORY
            amount = self.inverse[slot] * _dot(self.weights[slot], vector)
            vector = vector - amount[:, None, None] * self.gradient[slot]
            return vector, amounts.at[slot].set(amount)

        def oldest_first(age, vector):
            slot = (visit + 1 + age) % _MEMORY
            projection = self.inverse[slot] * _dot(self.gradient[slot], vector)
            amount = amounts[slot] - projection
            return vector + amount[:, None, None] * self.weights[slot]

        amounts = jnp.zeros_like(self.inverse)
        vector, amounts = lax.fori_loop(0, _MEMORY, newest_first, (gradient, amounts))
        slot = visit % _MEMORY
        newest = self.gradient[slot]
        length = self.inverse[slot] * _dot(newest, _product_of_rows(newest, metric))
        scale = 1.0 / jnp.where(length > 0, length, 1.0)
        vector = scale[:, None, None] * _product_of_rows(vector, metric)
        return -lax.fori_loop(0, _MEMORY, oldest_first, vector)


def _line_search(problem, logits, change, weights, step, value, slope, active) -> Array:
    """Return each fold's step length: 1, or shorter by secants of the slope.

    A length is accepted if the value falls enough, and the slope there is at most minus half of the
    negative `slope`. It is 0 for inactive folds, and after 25 trials.
    """
    # Near the minimum values differ by less than their rounding, hence the slack and the condition
    # on the slope. Logits are linear in the length, so trials do not need the data.
    slack = 8 * jnp.finfo(logits.dtype).eps * jnp.abs(value)

    def body(state):
        length, searching, num_trials = state
        factor = length[:, None, None]
        new_logits = logits + factor * change
        new_weights = weights + factor * step
        residual = problem.residual(problem.probabilities(new_logits))
        new_slope = _dot(residual, change)
        new_slope = new_slope + _dot(problem.penalty * new_weights, step)

        bound = value + 1e-4 * length * slope + slack
        is_lower = problem.value(new_logits, new_weights) <= bound
        searching = searching & ~(is_lower & (new_slope <= -0.5 * slope))
        difference = jnp.where(new_slope > slope, new_slope - slope, 1.0)
        shorter = length * jnp.clip(-slope / difference, 0.1, 0.7)
        return jnp.where(searching, shorter, length), searching, num_trials + 1

    def proceed(state):
        _, searching, num_trials = state
        return jnp.any(searching) & (num_trials < 25)

    start = (active.astype(logits.dtype), active, 0)
    length, failed, _ = lax.while_loop(proceed, body, start)
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
    """Return the fits of all folds, by at most `limit` steps of L-BFGS in a metric of all folds.

    `ids`: Fold that holds out each sample, [n]; `num_splits` for samples that are not in use.
    """
    problem, mean, deviation = build(x, y, ids, ridge, num_splits)

    def body(state):
        weights = state.weights
        logits = state.logits
        visit = state.visits
        probabilities = problem.probabilities(logits)
        gradient = problem.gradient(probabilities, weights)
        value = problem.value(logits, weights)
        square = _dot(gradient, gradient)
        # The last round takes no step, so value and gradient are those of the final weights.
        is_above_tol = square > 2 * ridge * tol * value
        active = state.active & is_above_tol & (visit < limit)

        pairs = state.pairs.add(visit, weights - state.past_weights, gradient - state.past_gradient)
        is_due = jnp.any(visit == jnp.asarray(_REFRESH)) | state.restart
        is_due = is_due & jnp.any(active)
        metric = lax.cond(is_due, lambda: _metric(problem, probabilities), lambda: state.metric)
        step = pairs.descend(visit, gradient, metric)
        step = jnp.where(active[:, None, None], step, 0.0)
        change = problem.logits(step)
        slope = _dot(gradient, step)
        descending = active & (slope < 0)
        length = _line_search(problem, logits, change, weights, step, value, slope, descending)

        # Without a length, a fold tries again without pairs and with a new metric. If it had both,
        # rounding limits it.
        stuck = active & (length == 0)
        retries = stuck & (jnp.any(pairs.inverse > 0, 0) | ~is_due)
        factor = length[:, None, None]
        return _State(
            weights=weights + factor * step,
            logits=logits + factor * change,
            past_weights=weights,
            past_gradient=gradient,
            value=value,
            square=square,
            pairs=pairs.forget(retries),
            metric=metric,
            active=active & (retries | ~stuck),
            restart=jnp.any(retries),
            visits=visit + 1,
        )

    def proceed(state):
        return jnp.any(state.active) & (state.visits <= limit)

    shape = (num_splits, y.shape[1])
    size = x.shape[1] + 1
    zero = jnp.zeros((num_splits,), x.dtype)
    weights = jnp.zeros((*shape, size), x.dtype)
    ring = jnp.zeros((_MEMORY, *weights.shape), x.dtype)
    inverse_ring = jnp.zeros((_MEMORY, num_splits), x.dtype)
    state = _State(
        weights=weights,
        logits=jnp.zeros((*shape, len(x)), x.dtype),
        past_weights=weights,
        past_gradient=weights,
        value=zero,
        square=zero,
        pairs=_Pairs(ring, ring, inverse_ring),
        metric=jnp.zeros((size, size), x.dtype),
        active=jnp.ones((num_splits,), bool),
        restart=jnp.asarray(False),
        visits=jnp.asarray(0),
    )
    state = lax.while_loop(proceed, body, state)

    plain = problem.plain(state.weights)
    scale = jnp.where(deviation > 0, 1.0 / deviation, 0.0)
    coefficients = plain[:, :, :-1] * scale[None, None]
    offset = jnp.sum(mean[None, None] * coefficients, -1)
    intercepts = plain[:, :, -1] - offset
    probabilities = problem.probabilities(state.logits)
    gap = state.square / (2 * ridge * state.value)
    return SoftmaxFit(
        probabilities=_held_out(probabilities, ids),
        coefficients=jnp.swapaxes(coefficients, 1, 2),
        intercepts=jnp.where(problem.offset[:, :, 0] < 0, -jnp.inf, intercepts),
        losses=state.value,
        gradient_norm=jnp.sqrt(state.square),
        gap=gap,
        converged=gap <= tol,
        iterations=state.visits - 1,
    )


def largest_eigenvalue(data: Array) -> Array:
    """Return the largest eigenvalue of A^T A, where A is `data`.

    It is found by 50 power iterations from the mean of the rows.
    """
    largest = jnp.max(jnp.abs(data))
    data = data / largest  # squares of sums do not overflow

    def body(_, vector):
        vector = _product(_product(data, vector), data)
        return vector / jnp.linalg.norm(vector)

    mean = jnp.mean(data, 0)
    vector = lax.fori_loop(0, 50, body, mean / jnp.linalg.norm(mean))
    return jnp.sum(_product(data, vector) ** 2) * largest**2


def descend_fixed(
    x: Array, y: Array, ids: Array, num_steps: Array, step_size: Array, *, num_splits: int
) -> Array:
    """Return held-out probabilities after gradient steps.

    A `step_size` of zero means the stable step of each fold.
    """
    is_used = ids < num_splits
    data = jnp.where(is_used[:, None], with_ones(x), 0.0)
    mask = _fold_masks(ids, num_splits, x.dtype)
    # Gradients are those of sums of losses. One bound on the curvature holds for every fold,
    # because its training samples are a subset. `step_size` is for the mean loss, so it is divided
    # by the number of training samples.
    bound = 0.5 * largest_eigenvalue(data)
    rate = step_size / jnp.sum(mask, 1)
    rate = jnp.where(step_size > 0, rate, 1.0 / bound)[:, None, None]
    zero = jnp.zeros((1, 1, 1), x.dtype)
    unit = jnp.ones_like(zero)
    problem = _Problem(data, y.T, mask[:, None], zero, unit, zero, zero)

    def predict(weights):
        return problem.probabilities(problem.logits(weights))

    def body(_, weights):
        residual = problem.residual(predict(weights))
        return weights - rate * problem.pull_back(residual)

    shape = (num_splits, y.shape[1], data.shape[1])
    weights = jnp.zeros(shape, x.dtype)
    weights = lax.fori_loop(0, num_steps, body, weights)
    return _held_out(predict(weights), ids)
