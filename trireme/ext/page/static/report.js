// The server's filter, over the rollouts that a report holds.

const SNIPPET = 160;

export function searched(run, query) {
  const text = (query.text ?? "").toLowerCase();
  const number = (name) => (query[name] === undefined || query[name] === "" ? null : Number(query[name]));
  const [least, most, step] = [number("least"), number("most"), number("step")];
  let rows = run.rollouts.filter((row) =>
    (!query.kind || row.kind === query.kind)
    && (step === null || row.step === step)
    && (!query.task || row.task === query.task)
    && (!query.group || row.group === query.group)
    && (least === null || (row.reward !== null && row.reward >= least))
    && (most === null || (row.reward !== null && row.reward <= most))
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
  const offset = Number(query.offset ?? 0);
  const page = rows.slice(offset, offset + Number(query.limit ?? 100)).map(({ row }) => row);
  return { total: rows.length, facts: run.facts, rows: query.whole === "1" ? page : page.map(item) };
}

const mixed = (place, seed) => ((place + 1) * 2654435761 * (2 * Number(seed ?? 0) + 1)) % 4294967296;

const item = (row) => ({
  ...row,
  prompt: (row.prompt ?? "").replace(/<\|?[a-z_/]+\|?>/g, " ").trim().slice(0, SNIPPET),
  reply: (row.response || row.failure?.message || "").slice(0, SNIPPET),
});
