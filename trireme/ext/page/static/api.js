// What the page knows of the runs: from the server, or in a report from the file itself.
import { groupsOf, searched } from "./report.js";

const held = globalThis.TRIREME_REPORT ?? null;
export const isReport = held !== null;

export async function ask(path, query = {}) {
  if (held) return fromReport(path, query);
  const wanted = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const answer = await fetch(`/api/${path}?${new URLSearchParams(wanted)}`);
  if (answer.status === 401) throw new Error("The page's token is not known any more: open the URL that trireme view printed.");
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error ?? `${path}: ${answer.status}`);
  return value;
}

// The reader's note on a run: all that the page can change.
export async function note(run, text, hidden) {
  const answer = await fetch("/api/note", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ run, text, hidden }) });
  if (!answer.ok) throw new Error((await answer.json()).error ?? `note: ${answer.status}`);
}

export function exportUrl(query, format) {
  const wanted = Object.entries({ ...query, format }).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return `/api/export?${new URLSearchParams(wanted)}`;
}

function fromReport(path, query) {
  if (path === "runs") return held.runs;
  if (path === "compare") {
    const found = held.compared[`${query.run} ${query.other}`];
    if (!found) throw new Error("This report holds too many runs to compare any two.");
    return found;
  }
  const run = held.of[query.run];
  if (!run) throw new Error(`This report has no run '${query.run}'.`);
  if (path === "groups") return groupsOf(run, query);
  if (path === "rollouts") return searched(run, query);
  if (path === "rollout") {
    const found = run.rollouts.find((row) => row.eid === query.eid && row.kind === (query.kind || "train"));
    if (!found) throw new Error(`This report does not hold the rollout ${query.eid}.`);
    return found;
  }
  if (path === "tokens") {
    const found = run.tokens[`${query.kind || "train"} ${query.eid}`];
    if (!found) throw new Error("This report does not hold the tokens of this rollout.");
    return found;
  }
  return run[path];
}
