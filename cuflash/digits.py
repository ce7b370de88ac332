"""Handwritten digits labelled by attention, with a metric learned through its gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import flash_attention, flash_attention_grad


class Learned(NamedTuple):
    """Losses by step, accuracies on the test images, and the test images with predictions."""

    train_loss: list[float]
    validation_loss: list[float]
    chosen: int  # the number of steps whose metric is kept
    sizes: tuple[int, int, int]  # images to train, to validate and to test
    accuracy_before: float
    accuracy: float
    accuracy_nearest: float  # of scikit-learn's nearest neighbour, for comparison
    images: np.ndarray
    labels: np.ndarray
    probabilities: np.ndarray


def learn_digits(xp: Any, steps: int, console: Any) -> Learned:
    """Learn a metric on training images and measure it on others; `xp` is NumPy or CuPy."""
    from rich.progress import track
    from sklearn.datasets import load_digits
    from sklearn.neighbors import KNeighborsClassifier

    images, labels = load_digits(return_X_y=True)
    images = images / 16
    random = np.random.default_rng(0)
    order = random.permutation(len(images))
    train, validation, test = np.split(order, [1000, 1300])
    digits = _Digits(xp, images, labels)
    metric = best = xp.eye(images.shape[1], dtype="float32")
    losses, validated = [], [digits.loss(digits.label(metric, validation, train), validation)]
    mean, square = xp.zeros_like(metric), xp.zeros_like(metric)
    quiet = not console.is_terminal
    numbers = range(1, steps + 1)
    for n in track(numbers, "Learning", console=console, transient=True, disable=quiet):
        # Half of the training images are labelled by the other half, drawn anew for each step,
        # so no image is ever its own neighbour.
        shuffled = random.permutation(train)
        loss, slope = digits.loss_and_slope(metric, shuffled[:500], shuffled[500:])
        losses.append(loss)
        # Adam (Kingma & Ba 2015, arXiv:1412.6980).
        mean = 0.9 * mean + 0.1 * slope
        square = 0.99 * square + 0.01 * slope * slope
        metric = metric - 0.02 * (mean / (1 - 0.9**n)) / (xp.sqrt(square / (1 - 0.99**n)) + 1e-8)
        validated.append(digits.loss(digits.label(metric, validation, train), validation))
        if validated[-1] == min(validated):
            best = metric
    before = digits.label(xp.eye(images.shape[1], dtype="float32"), test, train)
    after = digits.label(best, test, train)
    nearest = KNeighborsClassifier(1).fit(images[train], labels[train])
    return Learned(
        train_loss=losses,
        validation_loss=validated,
        chosen=validated.index(min(validated)),
        sizes=(len(train), len(validation), len(test)),
        accuracy_before=digits.accuracy(before, test),
        accuracy=digits.accuracy(after, test),
        accuracy_nearest=nearest.score(images[test], labels[test]),
        images=images[test],
        labels=labels[test],
        probabilities=after if xp is np else after.get(),
    )


class _Digits:
    """Kernel regression by attention: an unknown image is a query, known images are the keys.

    Values are one-hot labels, so a row of the output is a distribution over the ten digits. The
    metric W gives image y the weight exp(-|xW - yW|^2 / 2) in labelling image x. As a score that
    is xW . yW - |yW|^2 / 2, because what depends on x alone cancels in the softmax. One more
    column, 1 in the queries and -|yW|^2 / 2 in the keys, makes a plain product of it.
    """

    def __init__(self, xp: Any, images: np.ndarray, labels: np.ndarray) -> None:
        self.xp = xp
        self.images = xp.asarray(images, "float32")
        self.labels = xp.asarray(labels)
        self.one_hot = xp.eye(10, dtype="float32")[self.labels]

    def label(self, metric: Any, unknown: Any, known: Any) -> Any:
        """Probabilities of the ten digits, a row for each unknown image."""
        return self._attend(metric, unknown, known)[3]

    def loss(self, probabilities: Any, unknown: Any) -> float:
        """Mean of -log(probability of the right digit)."""
        return float(-self.xp.log(self._right(probabilities, unknown)).mean())

    def accuracy(self, probabilities: Any, unknown: Any) -> float:
        """Share of the images whose most probable digit is the right one."""
        return float((probabilities.argmax(1) == self.labels[unknown]).mean())

    def loss_and_slope(self, metric: Any, unknown: Any, known: Any) -> tuple[float, Any]:
        """The loss and its gradient with respect to the metric."""
        q, k, v, out, lse = self._attend(metric, unknown, known)
        dout = -self.one_hot[unknown] / self._right(out, unknown)[:, None] / len(unknown)
        grads = flash_attention_grad(dout, q, k, v, out, lse, scale=1)
        dq = grads.dq[:, :-1]
        dk = grads.dk[:, :-1] - grads.dk[:, -1:] * k[:, :-1]  # the last column is -|k|^2 / 2
        slope = self.images[unknown].T @ dq + self.images[known].T @ dk
        return self.loss(out, unknown), slope

    def _attend(self, metric: Any, unknown: Any, known: Any) -> tuple[Any, ...]:
        q, k = self.images[unknown] @ metric, self.images[known] @ metric
        q = self.xp.concatenate([q, self.xp.ones((len(q), 1), q.dtype)], 1)
        k = self.xp.concatenate([k, -(k * k).sum(1, keepdims=True) / 2], 1)
        v = self.one_hot[known]
        out, lse = flash_attention(q, k, v, scale=1, return_lse=True)
        return q, k, v, out, lse

    def _right(self, probabilities: Any, unknown: Any) -> Any:
        # A probability may round to 0; the floor keeps its logarithm and its inverse finite.
        return self.xp.maximum((probabilities * self.one_hot[unknown]).sum(1), 1e-6)
