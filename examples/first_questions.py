"""The five questions that people ask first of a run, answered from an export of it.

    echoswarm export --to out
    marimo edit examples/first_questions.py -- --from out        # or `marimo run`, or `python examples/first_questions.py --from out`

Needs the extra `notebook`.
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")


@app.cell
def _():
    import marimo as mo
    import plotly.graph_objects as go

    from echo_replay.export.manifest import open_export
    from echo_replay.export.queries import ask

    return ask, go, mo, open_export


@app.cell
def _(mo):
    folder = mo.cli_args().get("from") or "out"
    run = mo.cli_args().get("run") or ""
    return folder, run


@app.cell
def _(ask, folder, mo, open_export, run):
    from pathlib import Path

    home, manifest = open_export(Path(folder), run)

    def rows_of(question):
        """The answer to one SELECT, a dictionary for each row."""
        answer = ask(home, manifest, question, timeout_s=60.0, limit=0)
        return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]

    mo.md(f"# {manifest.run_id}\n\nUp to version {manifest.tip}, with the rewards {', '.join(manifest.reward_names) or 'none'}.")
    return manifest, rows_of


@app.cell
def _(manifest, mo):
    reward = mo.ui.dropdown(manifest.reward_names, value=next(iter(manifest.reward_names), None), label="Reward")
    reward  # noqa: B018  shown
    return (reward,)


@app.cell
def _(manifest, mo, reward):
    mo.stop(not manifest.reward_names, mo.md("No reward has scored anything yet."))
    name = reward.value.replace('"', '""')
    value, mean, spread = f'"reward_{name}"', f'"reward_{name}_mean"', f'"reward_{name}_std"'
    return mean, spread, value


@app.cell
def _(go, mo, rows_of, value):
    curve = rows_of(f"""
        select step, avg({value}) as mean, stddev_samp({value}) as std
        from trajectories where fate = 'trained' group by step order by step
    """)  # noqa: S608  quoted
    means = [row["mean"] for row in curve if row["mean"] is not None]
    tenth = max(1, len(means) // 10)
    first, last = (sum(part) / len(part) if part else None for part in (means[:tenth], means[-tenth:]))
    learns = mo.vstack(
        [
            mo.md(
                f"## 1. Does it learn?\n\nFrom {first:.3f} in the first {tenth} steps to **{last:.3f}** in the last {tenth}."
                if means
                else "## 1. Does it learn?\n\nNo step has trained a sample with this reward."
            ),
            go.Figure(go.Scatter(x=[row["step"] for row in curve], y=[row["mean"] for row in curve], mode="lines+markers")),
        ]
    )
    learns  # noqa: B018  shown
    return (curve,)


@app.cell
def _(mo, rows_of):
    dropped = rows_of("""
        select coalesce(drop_reason, fate) as why, count(*) as samples, round(100 * count(*) / sum(count(*)) over (), 1) as percent,
               count(distinct worker_id) as workers, sum(num_generated) as tokens, any_value(drop_detail) as for_example
        from trajectories where purpose = 'train' group by why order by samples desc
    """)
    mo.vstack([mo.md("## 2. What is dropped, and why?\n\nOf everything that was sampled for training."), mo.ui.table(dropped)])
    return (dropped,)


@app.cell
def _(go, mo, rows_of):
    # A step trains the version before the one that it makes.
    ages = rows_of("""
        select step - 1 - min_version as staleness, count(*) as samples
        from trajectories where fate = 'trained' and source = 'live' group by staleness order by staleness
    """)
    num_trained = sum(row["samples"] for row in ages)
    mean_age = sum(row["staleness"] * row["samples"] for row in ages) / max(1, num_trained)
    mo.vstack(
        [
            mo.md(f"## 3. How stale is what it trains on?\n\nOn average {mean_age:.2f} versions, over {num_trained:,} samples."),
            go.Figure(go.Bar(x=[row["staleness"] for row in ages], y=[row["samples"] for row in ages])),
        ]
    )
    return (ages,)


@app.cell
def _(mo, rows_of):
    workers = rows_of("""
        select worker_id, any_value(engine) as engine, count(*) as samples,
               round(1000 * sum(num_generated) / nullif(sum(finished_ms - started_ms), 0), 1) as tokens_per_s_of_a_sample,
               round(median(finished_ms - requested_ms) / 1000, 2) as median_s_from_request,
               count(*) filter (drop_reason = 'stale') as dropped_as_stale,
               count(*) filter (drop_reason = 'wrong_version') as served_another_version
        from trajectories where worker_id is not null and source = 'live' group by worker_id order by tokens_per_s_of_a_sample
    """)
    mo.vstack(
        [
            mo.md(
                "## 4. Which worker is slow, or lies?\n\nThe slowest first. `served_another_version`: its log-probabilities are not "
                "those of the version that it named, so the learner dropped them."
            ),
            mo.ui.table(workers),
        ]
    )
    return (workers,)


@app.cell
def _(mean, mo, rows_of, spread):
    # Where all samples of a group have the same reward, every advantage is zero.
    useless = rows_of(f"""
        select prompt, count(*) as groups, count(*) filter (coalesce({spread}, 0) = 0) as without_signal, avg({mean}) as mean_reward
        from groups where purpose = 'train' and {mean} is not null
        group by prompt order by without_signal desc, groups limit 100
    """)  # noqa: S608  quoted
    mo.vstack(
        [
            mo.md(
                "## 5. Which prompts teach nothing?\n\nThose whose groups have the same reward for every sample: "
                "always right (too easy), or always wrong (too hard)."
            ),
            mo.ui.table(useless),
        ]
    )
    return (useless,)


if __name__ == "__main__":
    app.run()
