// Draws the charts of a page from its data blocks. Colours come from the tokens, so that they follow the scheme and print.
const FONT = '13px "Atkinson Next", system-ui, sans-serif';
const probe = document.body.appendChild(Object.assign(document.createElement("i"), { className: "vh" }));
probe.setAttribute("aria-hidden", "true");

// A custom property with light-dark() is text for a script: only a used colour is one.
function colour(name, alpha = 1) {
  probe.style.color = `var(--${name})`;
  const [red, green, blue] = getComputedStyle(probe).color.match(/[\d.]+/g);
  return `rgba(${red},${green},${blue},${alpha})`;
}

const line = (name, more = {}) => ({ stroke: () => colour(name), width: 2, points: { show: false }, spanGaps: true, ...more });
const axis = more => ({ stroke: () => colour("ink-3"), font: FONT, ...more });
// Times are whole minutes, and steps and looks are whole.
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000];
const MINUTES = [1, 2, 5, 10, 15, 30, 60].map(one => 60 * one);
const axes = isTime => [
  axis({
    grid: { show: false }, ticks: { stroke: () => colour("line"), size: 4 }, size: 26, space: 64, incrs: isTime ? MINUTES : WHOLE,
    // Times are UTC, as everywhere on a page.
    ...(isTime && { values: (chart, found) => found.map(one => new Date(one * 1000).toISOString().slice(11, 16)) }),
  }),
  axis({ grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, size: 56, gap: 6, space: 30 }),
];

// What a kind of chart looks like; its columns are in the data block.
const KINDS = {
  loss: data => ({
    scales: { x: { time: false, range: [0, Math.max(data.total, 1)] } },
    series: [
      {},
      line("candidate-fill", { width: 1, alpha: 0.35 }),
      line("candidate-fill", { width: 2, alpha: 0.6 }),
      line("candidate-fill", { width: 2.2, points: { show: true, size: 7, width: 2, fill: () => colour("sheet") } }),
      // Another job beside this one.
      line("baseline-fill", { width: 1.8, dash: [8, 4] }),
    ].slice(0, data.columns.length),
    names: ["training", "training, smoothed", "validation", `validation of ${data.other}`].slice(0, data.columns.length - 1),
  }),
  arms: data => ({
    scales: { y: { range: (chart, low, high) => [0, (high || 1) * 1.1] } },
    series: [{}, ...data.arms.map(arm => line(`${arm}-fill`, arm === "baseline" ? { width: 1.8, dash: [8, 4] } : { width: 2.4 }))],
    names: data.names,
  }),
};

// Two bands, the same for every gate: what climbs into the upper one is proven, what sinks into the lower one is rolled back.
function bands(chart) {
  const { ctx, bbox } = chart, dots = devicePixelRatio, y = value => chart.valToPos(value, "y", true);
  ctx.save();
  for (const [name, from, to, text] of [["proven", bbox.top, y(1), "proven"], ["harm", y(-1), bbox.top + bbox.height, "rolled back"]]) {
    ctx.fillStyle = colour(`${name}-soft`);
    ctx.fillRect(bbox.left, from, bbox.width, to - from);
    ctx.fillStyle = colour(name);
    ctx.font = `${12 * dots}px "Atkinson Next", sans-serif`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.fillText(text, bbox.left + 6 * dots, (from + to) / 2);
  }
  ctx.restore();
}

function rules(chart, steps, starts) {
  const { ctx, bbox } = chart, dots = devicePixelRatio;
  ctx.save();
  ctx.lineWidth = 1.2 * dots;
  const stroke = (name, dash, x1, y1, x2, y2) => {
    ctx.strokeStyle = colour(name);
    ctx.setLineDash(dash.map(one => one * dots));
    ctx.beginPath();
    ctx.moveTo(x1, y1);
    ctx.lineTo(x2, y2);
    ctx.stroke();
  };
  for (const step of steps) {
    const x = chart.valToPos(step, "x", true);
    stroke("line", [2, 3], x, bbox.top, x, bbox.top + bbox.height);
  }
  // Another rollout of the same release begins.
  for (const start of starts) {
    const x = chart.valToPos(start, "x", true);
    stroke("line-strong", [], x, bbox.top, x, bbox.top + bbox.height);
  }
  for (const [value, name, dash] of [[0, "line-strong", [2, 3]], [1, "proven", []], [-1, "harm", []]]) {
    const y = chart.valToPos(value, "y", true);
    stroke(name, dash, bbox.left, y, bbox.left + bbox.width, y);
  }
  ctx.restore();
}

KINDS.evidence = data => ({
  scales: { x: { time: false }, y: { range: [-1.5, 1.5] } },
  axes: [{ show: false }, { show: false }],
  padding: [2, 6, 2, 2],
  series: [{}, line("proven", { width: 2.4, spanGaps: false }), line("harm", { width: 2, spanGaps: false })],
  names: ["proof", "harm"],
  draws: { drawClear: [bands], draw: [chart => rules(chart, data.steps, data.starts)] },
  // Looks count from 1 in each rollout.
  place: at => at - (data.starts.findLast(start => start <= at) ?? 0),
});

const charts = new Map();

function dataOf(element) {
  const block = document.getElementById(element.dataset.chart);
  return block && JSON.parse(block.textContent);
}

function make(element, data) {
  const kind = KINDS[data.kind](data);
  const chart = new uPlot({
    width: element.clientWidth,
    height: element.clientHeight,
    axes: axes(kind.scales.x?.time !== false),
    legend: { show: false },
    padding: [8, 24, 0, 0],
    cursor: { points: { size: 7 }, drag: { x: false, y: false } },
    hooks: { setCursor: [() => tell(element, chart, kind)], ...kind.draws },
    ...kind,
  }, data.columns, element);
  return chart;
}

// Says what lies under the cursor, for those who move it by keys, too.
function tell(element, chart, { names, place: numbered = at => at }) {
  const readout = element.parentElement.querySelector(".readout");
  const at = chart.cursor.idx;
  if (!readout || at === null || at === undefined) return;
  const parts = names
    .map((name, number) => [name, chart.data[number + 1][at]])
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => `${name} ${value.toFixed(3)}`);
  const place = chart.data[0][at];
  const where = chart.scales.x.time ? new Date(place * 1000).toISOString().slice(11, 16) : numbered(place).toLocaleString("en");
  readout.textContent = `${where}: ${parts.join(", ")}`;
}

function draw(again) {
  for (const element of document.querySelectorAll("[data-chart]")) {
    const data = dataOf(element);
    if (!data) continue;
    const known = charts.get(element);
    const total = JSON.stringify([data.total, data.steps, data.starts, data.names]);
    if (known && !again && known.total === total) {
      known.chart.setData(data.columns);
      continue;
    }
    known?.chart.destroy();
    charts.set(element, { chart: make(element, data), total });
    fit.observe(element);
  }
  for (const element of charts.keys()) if (!element.isConnected) charts.delete(element);
  document.documentElement.dataset.drawn = "1";
}

const STEPS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
document.addEventListener("keydown", event => {
  const known = charts.get(event.target);
  const step = STEPS[event.key];
  if (!known || step === undefined) return;
  event.preventDefault();
  const { chart } = known, last = chart.data[0].length - 1;
  const at = Math.max(0, Math.min(last, (chart.cursor.idx ?? last) + step));
  chart.setCursor({ left: chart.valToPos(chart.data[0][at], "x"), top: 10 });
});

const fit = new ResizeObserver(entries => {
  for (const { target } of entries) charts.get(target)?.chart.setSize({ width: target.clientWidth, height: target.clientHeight });
});
document.addEventListener("points", () => draw(false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
addEventListener("beforeprint", () => draw(true));
addEventListener("afterprint", () => draw(true));
document.fonts.load(FONT).then(() => draw(true));
