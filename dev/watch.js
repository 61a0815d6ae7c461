// The page of dev/watch.py. Every second it asks for what the logs have gained, keeps all records, and draws of each curve
// what is in sight, thinned to the smallest and largest value of POINTS stretches, so that spikes stay.
"use strict";
const COLOURS = /*COLOURS*/[];
const POINTS = 1000, EVERY_MS = 1000;
const element = (id) => document.getElementById(id);
const runs = new Map(); // name -> {summary, records: {kind: [...]}, changes, shown, colour, curves}
const recordsOf = (run, kind) => run.records[kind] || [];
const lastOf = (run, kind) => recordsOf(run, kind).at(-1) || {};
const numbersOf = (records, field, factor = 1) => records.map((record) => (record[field] ?? NaN) * factor);
const figures = {};
let range; // of all figures' horizontal axis

// Figures: the records they draw, the field, a factor, and what their axis says.
const FIGURES = [
  { id: "loss", kind: "train", field: "loss", title: "loss: training (thin), validation (dots)", label: "nats a token" },
  { id: "bytes", kind: "val", field: "bpb", title: "validation, as the runs' tokenizers differ", label: "bits per byte", hidden: true },
  { id: "eval", kind: "eval", field: "acc", title: "evaluations", label: "share of right answers", range: { start: 0, end: 1 }, hidden: true },
  { id: "speed", kind: "train", field: "tok_s", title: "speed", label: "tokens a second" },
  { id: "norm", kind: "train", field: "norm", title: "norm of the gradient", label: "before clipping" },
  { id: "lr", kind: "train", field: "lr", title: "learning rate", label: "", range: { start: 0 } },
  { id: "memory", kind: "memory", field: "used_bytes", factor: 2 ** -30, title: "memory of the GPU", label: "GiB", hidden: true },
  { id: "skipped", kind: "train", field: "skipped", title: "skipped steps", label: "", range: { start: 0 } },
];

function makeFigure(about) {
  const log = about.id === "loss" && element("log").checked;
  const plot = Bokeh.Plotting.figure({
    title: about.title, height: about.id === "loss" ? 380 : 230, sizing_mode: "stretch_width", x_range: range,
    y_axis_type: log ? "log" : "linear", y_range: new Bokeh.DataRange1d(about.range || {}), tools: "pan,wheel_zoom,box_zoom,reset,save", active_drag: "box_zoom",
  });
  plot.left[0].axis_label = about.label;
  const axis = element("axis").value, format = axis === "time_s" ? "00:00:00" : "0.[00]a";
  plot.below[0].axis_label = { tokens: "tokens", step: "steps", time_s: "hours:minutes:seconds" }[axis];
  plot.below[0].formatter = new Bokeh.NumeralTickFormatter({ format });
  const tips = [["", "$name"], [axis, `@x{${format}}`], ["", "@y{0.[00000]}"]];
  plot.add_tools(new Bokeh.HoverTool({ tooltips: tips, mode: "mouse", line_policy: "nearest" }));
  const box = document.createElement("div");
  box.className = about.id === "loss" ? "wide" : "";
  box.id = "plot_" + about.id;
  box.hidden = Boolean(about.hidden);
  element("plots").append(box);
  figures[about.id] = { about, plot, box };
}

function makeFigures() {
  element("plots").replaceChildren();
  range = new Bokeh.DataRange1d({ range_padding: 0.02 });
  let waiting = 0;
  for (const property of [range.properties.start, range.properties.end]) {
    property.change.connect(() => { clearTimeout(waiting); waiting = setTimeout(drawAll, 80); });
  }
  FIGURES.forEach(makeFigure);
  const page = new Bokeh.Document(); // one for all figures, because they share the range
  Object.values(figures).forEach((figure) => page.add_root(figure.plot));
  Bokeh.embed.add_document_standalone(page, element("plots"), Object.values(figures).map((figure) => figure.box));
  for (const run of runs.values()) run.curves = new Map();
}

// A curve of a run in a figure; it is made when it is drawn first.
function curve(run, figure, name, look) {
  const key = figure.about.id + " " + name;
  if (!run.curves.has(key)) {
    const source = new Bokeh.ColumnDataSource({ data: { x: [], y: [] } });
    const options = { source, name: run.name + name, ...look };
    const glyph = look.marker
      ? figure.plot.scatter({ field: "x" }, { field: "y" }, options)
      : figure.plot.line({ field: "x" }, { field: "y" }, options);
    run.curves.set(key, { source, glyph });
  }
  return run.curves.get(key);
}

// Means of the finite ones of `width` values around each, fewer at both ends; a gap stays a gap.
function smoothed(values, width) {
  const sums = [0], counts = [0];
  values.forEach((value, i) => {
    const good = Number.isFinite(value);
    sums.push(sums[i] + (good ? value : 0));
    counts.push(counts[i] + (good ? 1 : 0));
  });
  return values.map((value, i) => {
    const half = Math.min(width >> 1, i, values.length - 1 - i);
    return Number.isFinite(value) ? (sums[i + half + 1] - sums[i - half]) / (counts[i + half + 1] - counts[i - half]) : NaN;
  });
}

// Of the points from `low` to `high`, with one more on each side, the smallest and the largest of POINTS stretches.
function thinned(x, y, low, high) {
  let first = 0, last = x.length;
  while (first < last && x[first + 1] < low) first++;
  while (last > first && x[last - 2] > high) last--;
  const stride = Math.max(1, Math.ceil((last - first) / POINTS)), result = { x: [], y: [] };
  for (let begin = first; begin < last; begin += stride) {
    const end = Math.min(begin + stride, last);
    let small = begin, large = begin;
    for (let i = begin; i < end; i++) {
      if (!(y[i] >= y[small])) small = i;
      if (!(y[i] <= y[large])) large = i;
    }
    for (const i of small === large ? [small] : [Math.min(small, large), Math.max(small, large)]) {
      result.x.push(x[i]);
      result.y.push(y[i]);
    }
  }
  return result;
}

function fill(made, run, x, y) {
  const zoomed = range.have_updated_interactively;
  made.source.data = thinned(x, y, zoomed ? range.start : -Infinity, zoomed ? range.end : Infinity);
  made.glyph.visible = run.shown;
}

function drawCurve(run, figure) {
  const { kind, field, factor, id } = figure.about, records = recordsOf(run, kind);
  if (!records.length) return;
  const colour = run.colour, width = 2 ** Number(element("smooth").value);
  const x = numbersOf(records, element("axis").value);
  let y = numbersOf(records, field, factor);
  if (id === "loss" && width > 1) {
    fill(curve(run, figure, " unsmoothed", { color: colour, line_alpha: 0.2, line_width: 1 }), run, x, y);
    y = smoothed(y, width);
  } else if (id === "loss" && run.curves.has("loss  unsmoothed")) {
    run.curves.get("loss  unsmoothed").glyph.visible = false;
  }
  fill(curve(run, figure, "", { color: colour, line_width: 1.2, line_alpha: 0.9 }), run, x, y);
  if (id === "memory") fill(curve(run, figure, " at", { color: colour, size: 6, marker: "circle" }), run, x, y);
}

// A line, and a dot at each of its points.
function drawDotted(run, figure, name, records, y, look) {
  const x = numbersOf(records, element("axis").value);
  fill(curve(run, figure, " " + name, { color: run.colour, ...look }), run, x, y);
  fill(curve(run, figure, ` ${name} at`, { color: run.colour, size: 5, marker: "circle" }), run, x, y);
}

function drawEvaluations(run) {
  const all = recordsOf(run, "eval"), dashes = ["solid", "dashed", "dotted", "dotdash"];
  [...new Set(all.map((record) => record.name))].forEach((task, place) => {
    const its = all.filter((record) => record.name === task);
    const look = { line_width: 1.5, line_dash: dashes[place % dashes.length] };
    drawDotted(run, figures.eval, task, its, its.map((record) => record.acc_norm ?? record.acc ?? NaN), look);
  });
}

function draw(run) {
  FIGURES.filter((about) => about.id !== "eval").forEach((about) => drawCurve(run, figures[about.id]));
  const val = recordsOf(run, "val");
  drawDotted(run, figures.loss, "validation", val, numbersOf(val, "loss"), { line_width: 2.2 });
  drawEvaluations(run);
}

function drawAll() {
  for (const kind of ["eval", "memory"]) figures[kind].box.hidden = ![...runs.values()].some((run) => recordsOf(run, kind).length);
  const ratios = [...runs.values()].map((run) => lastOf(run, "val")).filter((val) => val.bpb).map((val) => val.loss / val.bpb);
  figures.bytes.box.hidden = !(Math.max(...ratios) > 1.01 * Math.min(...ratios));
  for (const run of runs.values()) draw(run);
}

function text(tag, content, className = "") {
  const made = document.createElement(tag);
  made.textContent = content;
  made.className = className;
  return made;
}

const shown = (value, digits = 4) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
const large = (value) => (value ? Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value) : "–");
const gib = (value) => (value ? (value * 2 ** -30).toFixed(2) + " GiB" : "–");
const ago = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`);

function listRuns() {
  const rows = [...runs.values()].map((run) => {
    const row = text("div", "", "run"), its = run.summary, swatch = text("span", "", "swatch"), words = text("div", "");
    swatch.style.background = run.shown ? run.colour : "#ddd";
    const last = lastOf(run, "train"), total = its.steps ? ` of ${its.steps}` : "";
    words.append(
      text("div", run.name),
      text("div", `step ${last.step ?? 0}${total}, loss ${shown(last.loss)}, validation ${shown(lastOf(run, "val").loss)}`, "facts"),
      text("div", `${large(last.tok_s)} tokens/s, written ${ago(its.age_s)} ago` +
        (last.skipped ? `, ${last.skipped} skipped` : "") + (its.resumes ? `, resumed ${its.resumes} x` : ""), "facts"));
    if (its.bad) words.append(text("div", its.bad, "facts"));
    row.append(swatch, words);
    row.onclick = () => { run.shown = !run.shown; draw(run); listRuns(); compare(); showSamples(); };
    return row;
  });
  element("runs").replaceChildren(...rows);
}

// One column a run; the rows are results, and those options that differ between the runs shown.
function compare() {
  const chosen = [...runs.values()].filter((run) => run.shown), rows = [["", ...chosen.map((run) => run.name)]];
  const add = (name, value) => rows.push([name, ...chosen.map(value)]);
  add("validation loss", (run) => shown(lastOf(run, "val").loss));
  add("lowest validation loss", (run) => shown(recordsOf(run, "val").reduce((low, val) => Math.min(low, val.loss ?? Infinity), Infinity)));
  add("bits per byte", (run) => shown(lastOf(run, "val").bpb));
  const tasks = new Set(chosen.flatMap((run) => recordsOf(run, "eval").map((record) => record.name)));
  const scores = (run, task) => recordsOf(run, "eval").findLast((record) => record.name === task) || {};
  const percent = (value) => (value == null ? "–" : `${(100 * value).toFixed(1)} %`);
  for (const task of tasks) add(task, (run) => percent(scores(run, task).acc_norm ?? scores(run, task).acc));
  for (const task of tasks) {
    const perplexity = (run) => scores(run, task).perplexity;
    if (chosen.some((run) => perplexity(run) > 0)) add(`${task}, perplexity`, (run) => (perplexity(run) > 1e4 ? large(perplexity(run)) : shown(perplexity(run), 2)));
  }
  add("tokens a second", (run) => large(lastOf(run, "train").tok_s));
  add("memory", (run) => gib(lastOf(run, "memory").used_bytes));
  add("skipped steps", (run) => String(lastOf(run, "train").skipped ?? "–"));
  add("parameters", (run) => large(run.summary.parameters));
  add("device", (run) => run.summary.device || "–");
  const names = new Set(chosen.flatMap((run) => Object.keys(run.summary.options)));
  for (const name of names) {
    const values = chosen.map((run) => String(run.summary.options[name] ?? "–"));
    if (name !== "run" && new Set(values).size > 1) rows.push(["--" + name, ...values]);
  }
  element("comparison").replaceChildren(...rows.map((cells, i) => {
    const row = document.createElement("tr");
    row.append(...cells.map((cell) => text(i ? "td" : "th", cell)));
    return row;
  }));
}

function showSamples() {
  const parts = [];
  for (const run of [...runs.values()].filter((run) => run.shown)) {
    for (const sample of recordsOf(run, "sample").filter(({ step }) => step === lastOf(run, "sample").step)) {
      const body = text("pre", "");
      body.append(text("span", sample.prompt ?? "", "prompt"), text("span", sample.text));
      parts.push(text("div", `${run.name}, step ${sample.step}`, "facts"), body);
    }
  }
  element("samples").replaceChildren(...(parts.length ? parts : [text("p", "none in these runs yet", "facts")]));
}

function take(name, news) {
  const run = runs.get(name);
  if (news.changes !== run.changes) run.records = {};
  run.changes = news.changes;
  for (const [kind, records] of Object.entries(news.records)) run.records[kind] = recordsOf(run, kind).concat(records);
}

async function ask() {
  const have = {};
  for (const [name, run] of runs) {
    have[name] = { changes: run.changes };
    for (const [kind, records] of Object.entries(run.records)) have[name][kind] = records.length;
  }
  try {
    const answer = await (await fetch("/news", { method: "POST", body: JSON.stringify(have) })).json();
    element("folder").textContent = answer.folder;
    element("trouble").textContent = "";
    for (const summary of answer.runs) {
      if (!runs.has(summary.name)) {
        const colour = COLOURS[runs.size % COLOURS.length];
        runs.set(summary.name, { name: summary.name, records: {}, changes: -1, shown: true, colour, curves: new Map() });
      }
      runs.get(summary.name).summary = summary;
    }
    for (const [name, news] of Object.entries(answer.news)) take(name, news);
    if (Object.keys(answer.news).length) { drawAll(); compare(); showSamples(); }
    listRuns();
  } catch (error) {
    element("trouble").textContent = `no answer from dev/watch.py (${error.message}); start it again`;
  }
  setTimeout(ask, EVERY_MS);
}

element("axis").onchange = element("log").onchange = () => { makeFigures(); drawAll(); };
element("smooth").oninput = () => {
  const width = 2 ** Number(element("smooth").value);
  element("window").textContent = width > 1 ? `${width} records` : "none";
  drawAll();
};
Bokeh.set_log_level("warn");
makeFigures();
ask();
