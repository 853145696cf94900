// Filtering rows by words. Words are matched against the few distinct names, not against the rows.

/** The rows of a scope that pass: every word must occur in the module, tensor, phase, class, dtype or status. */
export function filtered(data, rows, text, failingOnly) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const tests = words.map((word) => matching(data, word));
  const status = data.column("status");
  const kept = new Uint32Array(rows.length);
  let length = 0;
  next: for (const row of rows) {
    if (failingOnly && !data.failing[status[row]]) continue;
    for (const columns of tests) {
      let found = false;
      for (const { codes, hits } of columns) {
        if (hits[codes[row]]) {
          found = true;
          break;
        }
      }
      if (!found) continue next;
    }
    kept[length++] = row;
  }
  return kept.subarray(0, length);
}

/** For each searched column, the codes whose text contains the word. */
function matching(data, word) {
  const { modules, words } = data.head;
  const sources = [
    ["module", modules.shown],
    ["kind", words.kind],
    ["path", words.path],
    ["module_candidate", words.module_candidate],
    ["path_candidate", words.path_candidate],
    ["phase", words.phase],
    ["cls", words.cls],
    ["status", words.status],
    ["dtype", words.dtype],
    ["dtype_reference", words.dtype],
    ["dtype_candidate", words.dtype],
  ];
  return sources
    .filter(([name]) => data.column(name) !== null)
    .map(([name, texts]) => ({
      codes: data.column(name),
      hits: Uint8Array.from(texts, (each) => (each.toLowerCase().includes(word) ? 1 : 0)),
    }))
    .filter(({ hits }) => hits.includes(1));
}
