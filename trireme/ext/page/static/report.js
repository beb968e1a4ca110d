// The server's filter, over the rollouts that a report holds.

const SNIPPET = 160;

function ordered(run, query) {
  const text = (query.text ?? "").toLowerCase();
  const number = (name) => (query[name] === undefined || query[name] === "" ? null : Number(query[name]));
  const [least, most, step] = [number("least"), number("most"), number("step")];
  const ends = new Map(); // lowest and highest reward of each group
  for (const { kind, group, reward } of run.rollouts) if ((reward ?? null) !== null) {
    const [low, high] = ends.get(`${kind} ${group}`) ?? [reward, reward];
    ends.set(`${kind} ${group}`, [Math.min(low, reward), Math.max(high, reward)]);
  }
  const disagree = ({ kind, group }) => { const [low, high] = ends.get(`${kind} ${group}`) ?? [0, 0]; return low < high; };
  let rows = run.rollouts.filter((row) =>
    (!query.kind || row.kind === query.kind)
    && (step === null || row.step === step)
    && (!query.task || row.task === query.task)
    && (!query.group || row.group === query.group)
    && (least === null || (row.reward !== null && row.reward >= least))
    && (most === null || (row.reward !== null && row.reward <= most))
    && (query.disagree !== "1" || disagree(row))
    && (!query.cut || row.cut === (query.cut === "1"))
    && (!text || [row.prompt, row.response].some((said) => (said ?? "").toLowerCase().includes(text))));
  rows = rows.map((row, place) => ({ row, place }));
  const reward = ({ row }) => row.reward ?? 0;
  const unknown = ({ row }) => Number((row.reward ?? null) === null);
  const orders = {
    newest: (a, b) => b.row.step - a.row.step || b.place - a.place,
    oldest: (a, b) => a.row.step - b.row.step || a.place - b.place,
    best: (a, b) => unknown(a) - unknown(b) || reward(b) - reward(a) || a.place - b.place,
    worst: (a, b) => unknown(a) - unknown(b) || reward(a) - reward(b) || a.place - b.place,
    longest: (a, b) => (b.row.response_length ?? 0) - (a.row.response_length ?? 0),
    random: (a, b) => mixed(a.place, query.seed) - mixed(b.place, query.seed),
  };
  rows.sort(orders[query.order || "newest"]);
  return rows.map(({ row }) => row);
}

const pageOf = (rows, query) => rows.slice(Number(query.offset ?? 0), Number(query.offset ?? 0) + Number(query.limit ?? 100));

export function searched(run, query) {
  const rows = ordered(run, query);
  const page = pageOf(rows, query);
  return { total: rows.length, facts: run.facts, rows: query.whole === "1" ? page : page.map(item) };
}

// Groups with a match, each with the rewards of all its rollouts.
export function groupsOf(run, query) {
  const names = [...new Set(ordered(run, query).map((row) => row.group))];
  const groups = names.map((group) => {
    const rows = run.rollouts.filter((row) => row.group === group && row.kind === (query.kind || "train"));
    const known = rows.map((row) => row.reward ?? null).filter((value) => value !== null);
    const { kind, task, step, question } = rows[0];
    return { group, kind, task, step, question, mean: known.length ? known.reduce((a, b) => a + b, 0) / known.length : null, rollouts: rows.map(({ eid, reward, cut }) => ({ eid, reward: reward ?? null, cut, run: Number(eid.slice(group.length + 1).split("/")[0]) })).sort((a, b) => a.run - b.run) };
  });
  if (query.order === "best") groups.sort((a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity));
  if (query.order === "worst") groups.sort((a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity));
  return { total: groups.length, facts: run.facts, rows: pageOf(groups, query) };
}

const mixed = (place, seed) => ((place + 1) * 2654435761 * (2 * Number(seed ?? 0) + 1)) % 4294967296;

const item = (row) => ({
  ...row,
  reply: (row.response || row.failure?.message || "").slice(0, SNIPPET),
});
