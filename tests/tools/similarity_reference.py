"""Measures of similarity of representations in plain NumPy and SciPy, as references for tests.

They were written from the papers and the table of definitions, independently of the package, and
are slow, in float64. Samples are rows: x is [n, p], y is [n, q], with the same samples in the same
order.
"""

import itertools

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.special
import scipy.stats
from scipy.spatial.distance import cdist, jensenshannon, pdist, squareform
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import cross_val_predict

from dissociation._core import splits

RANK_TOLERANCE = (
    1e-12  # eigenvalues of a covariance below this share of the largest one count as zero
)


def centred(x):
    """The data without the mean of each column."""
    x = np.asarray(x, dtype=np.float64)
    return x - x.mean(axis=0)


def inverse_root(s):
    """Pseudo-inverse square root of a positive semi-definite matrix, on its range, and its rank."""
    values, vectors = scipy.linalg.eigh(s)
    kept = values > RANK_TOLERANCE * values.max()
    return vectors[:, kept] @ np.diag(values[kept] ** -0.5) @ vectors[:, kept].T, int(kept.sum())


def cosine(a, b):
    """Cosine of two arrays, as vectors."""
    return np.sum(a * b) / (np.linalg.norm(a) * np.linalg.norm(b))


def centred_gram(k):
    """HKH, H = I - 11'/n."""
    h = np.eye(len(k)) - 1 / len(k)
    return h @ k @ h


def hsic_unbiased(k, l):  # noqa: E741
    """HSIC_u (Song et al. 2012), of Gram matrices whose diagonals are dropped; no centring."""
    n = len(k)
    k, l, one = k - np.diag(np.diag(k)), l - np.diag(np.diag(l)), np.ones(n)  # noqa: E741
    total = np.sum(k * l)
    total += (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2))
    total -= 2 * (one @ k @ l @ one) / (n - 2)
    return total / (n * (n - 3))


def debiased_kernel_cka(k, l):  # noqa: E741
    """Cosine of two Gram matrices under HSIC_u."""
    return hsic_unbiased(k, l) / np.sqrt(hsic_unbiased(k, k) * hsic_unbiased(l, l))


def linear_gram(x):
    """The Gram matrix of the rows less their mean: a shift changes neither HSIC, but a large one costs their digits."""
    return centred(x) @ centred(x).T


def linear_cka(x, y):
    """Linear CKA (Kornblith et al. 2019): the cosine of the centred Gram matrices."""
    return cosine(linear_gram(x), linear_gram(y))


def debiased_cka(x, y):
    """Debiased linear CKA: HSIC_u in place of HSIC; may be negative."""
    return debiased_kernel_cka(linear_gram(x), linear_gram(y))


def rbf_cka(x, y, scale=1.0, debiased=False):
    """CKA of Gaussian kernels exp(-d^2 / (2 sigma^2)), sigma = scale * median of the distances d of pairs i<j."""
    distances = [pdist(one) for one in (x, y)]
    grams = [np.exp(-(squareform(d) ** 2) / (2 * (scale * np.median(d)) ** 2)) for d in distances]
    return debiased_kernel_cka(*grams) if debiased else cosine(*map(centred_gram, grams))


def debiased_rbf_cka(x, y):
    """Debiased CKA of Gaussian kernels."""
    return rbf_cka(x, y, debiased=True)


def procrustes_distance(x, y):
    """sqrt(|Xc|^2 + |Yc|^2 - 2 nuc(Xc'Yc)), size and shape."""
    x, y = centred(x), centred(y)
    return np.sqrt(max(np.sum(x**2) + np.sum(y**2) - 2 * np.linalg.norm(x.T @ y, "nuc"), 0.0))


def angle_cosine(x, y):
    """nuc(X'Y) / (|X| |Y|)."""
    return np.linalg.norm(x.T @ y, "nuc") / (np.linalg.norm(x) * np.linalg.norm(y))


def angular_similarity(x, y):
    """Cosine of the angle between shapes."""
    return angle_cosine(centred(x), centred(y))


def angular_distance(x, y):
    """Angle between shapes, in radians."""
    return np.arccos(min(angular_similarity(x, y), 1.0))


def partial_whitening_distance(x, y, a=0.5):
    """Angle between shapes of Z = Xc (a I + (1-a) (|Xc|/sqrt p) (Xc'Xc)^(-1/2)): a = 1 plain, a = 0 white."""

    def whitened(x):
        x, p = centred(x), x.shape[1]
        return x @ (
            a * np.eye(p) + (1 - a) * np.linalg.norm(x) / np.sqrt(p) * inverse_root(x.T @ x)[0]
        )

    return np.arccos(min(angle_cosine(whitened(x), whitened(y)), 1.0))


def rdm(x, kind):
    """Dissimilarities of all pairs of rows, i<j: (0,1), (0,2), ..., (1,2), ..."""
    return pdist(x, {"squared": "sqeuclidean"}.get(kind, kind))


def kendall_tau_a(a, b):
    """(concordant - discordant) / all pairs; a tie in either vector counts in neither."""
    n = len(a)
    difference = sum(
        np.sum(np.sign(a[i] - a[i + 1 :]) * np.sign(b[i] - b[i + 1 :])) for i in range(n)
    )
    return difference / (n * (n - 1) / 2)


def compare_rdms(a, b, comparison):
    """Similarity of two vectors of dissimilarities."""
    if comparison == "kendall":
        return kendall_tau_a(a, b)
    if comparison == "spearman":
        a, b = scipy.stats.rankdata(a), scipy.stats.rankdata(b)  # average ranks for ties
    return cosine(a, b) if comparison == "cosine" else cosine(a - a.mean(), b - b.mean())


def rsa(x, y, kind="euclidean", comparison="pearson"):
    """Representational similarity analysis: the same dissimilarity on both sides, then a comparison."""
    return compare_rdms(rdm(x, kind), rdm(y, kind), comparison)


def crossnobis_rsa(x, y):
    """Cosine of the cross-validated dissimilarities (a_i - a_j)'(b_i - b_j), i<j, of two halves each; not clipped."""
    half = len(x) // 2
    first, second = np.triu_indices(half, 1)
    apart = [part[first] - part[second] for one in (x, y) for part in (one[:half], one[half:])]
    return cosine((apart[0] * apart[1]).sum(1), (apart[2] * apart[3]).sum(1))


def distance_correlation(x, y):
    """Distance correlation (Szekely, Rizzo, Bakirov 2007): root of the ratio of the biased V-statistics."""
    return np.sqrt(max(cosine(*(centred_gram(squareform(pdist(one))) for one in (x, y))), 0.0))


def neighbours(x, number):
    """The sets of nearest rows of each row by cosine similarity, itself left out; the lower index wins a tie."""
    apart = squareform(pdist(x, "cosine")) + np.diag(np.full(len(x), np.inf))
    return [set(row) for row in np.argsort(apart, axis=1, kind="stable")[:, :number]]


def mutual_knn(x, y, num_neighbours=10):
    """Mean share of nearest neighbours in common."""
    pairs = map(set.intersection, neighbours(x, num_neighbours), neighbours(y, num_neighbours))
    return np.mean([len(common) / num_neighbours for common in pairs])


def knn_jaccard(x, y, num_neighbours=10):
    """Mean Jaccard index of the sets of nearest neighbours."""
    pairs = zip(neighbours(x, num_neighbours), neighbours(y, num_neighbours), strict=True)
    return np.mean([len(a & b) / len(a | b) for a, b in pairs])


def canonical(x, y):
    """Left singular vectors and singular values of Sx^(-1/2) Sxy Sy^(-1/2), the first min(rank x, rank y) of them."""
    x, y = centred(x), centred(y)
    (root_x, rank_x), (root_y, rank_y) = inverse_root(x.T @ x), inverse_root(y.T @ y)
    u, rho, _ = scipy.linalg.svd(root_x @ x.T @ y @ root_y)
    kept = min(rank_x, rank_y)
    return u[:, :kept], rho[:kept]


def cca(x, y):
    """Mean canonical correlation."""
    return np.mean(canonical(x, y)[1])


def cca_squared(x, y):
    """Mean squared canonical correlation."""
    return np.mean(canonical(x, y)[1] ** 2)


def svcca(x, y, variance=0.99):
    """Mean canonical correlation of the fewest leading principal components whose share of the variance is enough."""
    return cca(*(PCA(variance, svd_solver="full").fit_transform(one) for one in (x, y)))


def pwcca(x, y):
    """Sum w_i rho_i, w_i in proportion to sum_j |<h_i, xc_j>|, h_i the canonical variates of x (Morcos et al. 2018)."""
    u, rho = canonical(x, y)
    x = centred(x)
    h = x @ inverse_root(x.T @ x)[0] @ u  # orthonormal in sample space
    weights = np.abs(h.T @ x).sum(1)
    return np.sum(weights / weights.sum() * rho)


def gulp_distance(x, y, lam=0.01):
    """GULP (Boix-Adsera et al. 2022), the root of its squared distance, data scaled to |Xc|^2 = n."""
    n = len(x)
    x, y = centred(x), centred(y)
    x, y = x * np.sqrt(n) / np.linalg.norm(x), y * np.sqrt(n) / np.linalg.norm(y)
    sx, sy, sxy = x.T @ x / n, y.T @ y / n, x.T @ y / n
    inverse_x, inverse_y = (
        np.linalg.pinv(s + lam * np.eye(len(s)), rcond=RANK_TOLERANCE, hermitian=True)
        for s in (sx, sy)
    )
    ax, ay = inverse_x @ sx, inverse_y @ sy
    squared = (
        np.trace(ax @ ax) + np.trace(ay @ ay) - 2 * np.trace(inverse_x @ sxy @ inverse_y @ sxy.T)
    )
    return np.sqrt(max(squared, 0.0))


def linear_predictivity(x, y, alpha=0.0, folds=5):
    """R^2 of y from x over all samples and neurons together, on given folds, a number of the project's own, or none."""
    model = Ridge(alpha) if alpha else LinearRegression()
    every = np.arange(len(x))
    tests = splits.folds(len(x), folds) if isinstance(folds, int) else folds or []
    cuts = [(np.setdiff1d(every, test), test) for test in tests] or [(every, every)]
    predicted = cross_val_predict(model, x, y, cv=cuts)
    return r2_score(y, predicted, multioutput="variance_weighted")


def neuron_correlations(x, y):
    """Signed Pearson correlations [p, q] of the neurons."""
    return 1 - cdist(x.T, y.T, "correlation")


def hard_matching(x, y):
    """Largest mean signed correlation over one-to-one assignments of min(p, q) pairs of neurons."""
    c = neuron_correlations(x, y)
    return np.mean(c[scipy.optimize.linear_sum_assignment(c, maximize=True)])


def soft_matching(x, y):
    """max sum T_ij c_ij over transport plans with marginals 1/p and 1/q, as a linear programme."""
    c = neuron_correlations(x, y)
    p, q = c.shape
    rows = np.kron(np.eye(p), np.ones((1, q)))  # sum_j T_ij
    columns = np.kron(np.ones((1, p)), np.eye(q))  # sum_i T_ij
    marginals = np.concatenate([np.full(p, 1 / p), np.full(q, 1 / q)])
    result = scipy.optimize.linprog(
        -c.ravel(), A_eq=np.vstack([rows, columns]), b_eq=marginals, bounds=(0, None)
    )
    assert result.success, result.message
    return -result.fun


def disagreement(x, y):
    """Share of rows whose largest entries lie in different places."""
    return np.mean(np.argmax(x, 1) != np.argmax(y, 1))


def jensen_shannon(x, y):
    """Mean Jensen-Shannon divergence, in nats, of the softmax of each row."""
    return np.mean(
        jensenshannon(scipy.special.softmax(x, 1), scipy.special.softmax(y, 1), axis=1) ** 2
    )


def min_max_disagreement(x, y, labels):
    """(d - dmin) / (dmax - dmin), the bounds that the two error rates allow."""
    ex, ey = np.mean(np.argmax(x, axis=1) != labels), np.mean(np.argmax(y, axis=1) != labels)
    low, high = abs(ex - ey), min(ex + ey, 1.0)
    return (disagreement(x, y) - low) / (high - low)


def permutation_moments(k, l):  # noqa: E741
    """Mean, variance and third central moment of sum_ij k_ij l_{pi(i)pi(j)} over all permutations pi."""
    values = np.array(
        [np.sum(k * l[np.ix_(pi, pi)]) for pi in itertools.permutations(range(len(k)))]
    )
    return values.mean(), values.var(), scipy.stats.moment(values, 3)


def classical_mds(distances, num_dims):
    """Coordinates [n, num_dims] of a matrix of distances [n, n], axes by descending eigenvalue, signs arbitrary."""
    values, vectors = scipy.linalg.eigh(-0.5 * centred_gram(distances**2))
    leading = np.argsort(-values)[:num_dims]
    return vectors[:, leading] * np.sqrt(np.maximum(values[leading], 0.0))
