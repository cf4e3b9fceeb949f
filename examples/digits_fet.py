"""FeT on handwritten digits from Python: five parties in one process, with a privacy budget.

One table is split between a primary, which has the labels, and four secondaries, by FeT's own
protocol: features are dealt out at random, and what parties have in common is a blurred key, so
rows are linked to their nearest records instead of being joined.

Run: ``python examples/digits_fet.py [--smoke] [--epsilon 32] [--seed 0]``
"""

import argparse

from sklearn.datasets import load_digits

import securevfl as sv


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, print what came out, and return the two test accuracies and epsilon."""
    options = _parser().parse_args(arguments)
    X, y = load_digits(return_X_y=True)
    if options.smoke:
        X, y = X[:600], y[:600]
    parties = sv.datasets.split_table(X, y, parties=5, key_dim=4, key_noise=0.05, seed=options.seed)

    # Every secondary releases one vector a row. Encoders are frozen: they were not trained on
    # private records, so that a row can be released once and then reused.
    model = sv.models.FeT(
        neighbours=4,
        dropout=0.3,
        release="pooled",
        frozen_map="linear",
        keys_as_features=False,
    )
    # Each record chooses the one row that it is nearest to, and can change no other.
    linkage = sv.LinkageSettings(protection="none", choose="records")
    privacy = sv.dp.Privacy(
        epsilon=options.epsilon,
        delta=1e-5,
        unit="secondary-record",
        encoder="frozen",
        links_per_record=1,
    )
    training = sv.TrainingSettings(
        epochs=10 if options.smoke else 120,
        batch_size=64,
        learning_rate=2e-3 if options.smoke else 5e-4,
        patience=15,
        split="random",
    )
    run = sv.simulate(
        parties,
        model,
        privacy=privacy,
        linkage=linkage,
        training=training,
        # Pixels count ink from 0 to 16. The bounds were known before anyone saw a record; a mean
        # and a deviation would be statistics of private records, and not covered by epsilon.
        bounds=[0.0, 16.0],
        seed=options.seed,
        observe=_show,
    )

    figures = run.metrics
    print(f"\ntest accuracy, joint: {figures['test']:.3f}  (best epoch {figures['best_epoch']})")
    print(f"test accuracy, alone: {figures['alone_test']:.3f}  ({figures['alone']['chosen']})")
    print(figures["gain"]["verdict"])
    print(f"\n{figures['privacy']['statement']}")
    for row in figures["privacy"]["channels"]:
        print(f"- {row['channel']}: {row['guarantee']}")
    return {
        "joint": figures["test"],
        "alone": figures["alone_test"],
        "epsilon": figures["privacy"]["epsilon"],
    }


def _show(event: sv.progress.ProgressEvent) -> None:
    if isinstance(event, sv.progress.EpochDone):
        spent = "" if event.epsilon is None else f", epsilon {event.epsilon:.3g}"
        print(
            f"epoch {event.epoch:>2}: loss {event.loss:.3f}, "
            f"validation accuracy {event.validation:.3f}{spent}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="FeT on handwritten digits, five parties.")
    parser.add_argument("--smoke", action="store_true", help="a third of the rows, 10 epochs")
    parser.add_argument("--epsilon", type=float, default=32.0, help="what a record may cost")
    parser.add_argument("--seed", type=int, default=0, help="of the split, models and shuffling")
    return parser


if __name__ == "__main__":
    main()
