"""A comparison of evaluations with and without tools: how much their calls help and harm."""

from dataclasses import replace

from vlm_grpo.eval.scored import WITHOUT_TOOLS, Row, Scored, collect_columns, column_mean


def compare_tools(scored: Scored, plain: Scored | None = None) -> Scored:
    """Add to a table the primary metric of the same examples without tools (None: there is nothing
    to add), and what tools gain and harm: by how much each example is better or worse with a call,
    or 0. Of a metric of 0 or 1 the means are shares of the examples. ``tools/prompt`` is the mean
    change of those that call nothing, which only read the tools' description.
    """
    if plain is None:
        return scored
    others = {row["id"]: {**row["rewards"], **row["metrics"]} for row in plain.rows}
    names, rows = scored.parts or {scored.primary_metric: scored.lower_is_better}, list[Row]()
    for row in scored.rows:
        metrics, other = {**row["metrics"]}, others.get(row["id"], {})
        for name, is_error in names.items():
            now, before = {**row["rewards"], **row["metrics"]}.get(name), other.get(name)
            if name in other:
                metrics[name + WITHOUT_TOOLS] = before
            if now is not None and before is not None:
                change = before - now if is_error else now - before
                # Without a call only the description of the tools can have changed the answer.
                gain = 0.0 if row["metrics"].get("tools/called") == 0 else change
                metrics |= {"tools/gain": max(0.0, gain), "tools/harm": max(0.0, -gain)}
                metrics["tools/prompt"] = change - gain
        rows.append({**row, "metrics": metrics})
    columns = collect_columns(rows)
    compared = ("tools/gain", "tools/harm", "tools/prompt")
    means = {name: column_mean(columns[name]) for name in compared if name in columns}
    means |= {n + WITHOUT_TOOLS: plain.metrics[n] for n in names if n in plain.metrics}
    return replace(scored, rows=tuple(rows), metrics={**scored.metrics, **means})
