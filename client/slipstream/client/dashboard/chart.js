// One chart: lines over steps as SVG, with the values under the pointer in its caption.

const NS = "http://www.w3.org/2000/svg";
const WIDTH = 420, HEIGHT = 190, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;

export function element(name, attributes = {}, text = null, namespace = null) {
  const made = namespace ? document.createElementNS(namespace, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  // Text from models and environments is never markup.
  if (text !== null) made.textContent = text;
  return made;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
}

// Formats a value as `number` does, no wider than the margin of a chart.
function tick(value) {
  if (Math.abs(value) >= 1e5) return value.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 3 });
  return number(value).replace(/\.?0+e/, "e");
}

// Returns round numbers from `low` to `high`, about `wanted` of them.
function ticks(low, high, wanted) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step)
    found.push(Math.abs(at) < step / 1e6 ? 0 : at);
  return found;
}

function span(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  if (low > high) return null;
  if (low === high) { const room = Math.abs(low) * 0.1 || 1; return [low - room, high + room]; }
  return [low, high];
}

// Returns the range that is shown, and the highest value if it lies far above that range. One spike, such
// as the first step with its start, would make a flat line of all other values.
function range(values) {
  const all = span(values);
  if (all === null || values.length < 20) return [all, null];
  const sorted = [...values].sort((a, b) => a - b), most = sorted[Math.floor(sorted.length * 0.98)];
  const room = (most - all[0]) * 1.25;
  if (room <= 0 || all[1] - all[0] <= 2 * room) return [all, null];
  return [[all[0], all[0] + room], all[1]];
}

const COLOURS = 6;

// series: [{name, points: [[x, y], ...], dots}]
export function draw(figure, title, series) {
  const caption = element("figcaption");
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title }, null, NS);
  figure.replaceChildren(caption, svg);
  const xs = span(series.flatMap(({ points }) => points.map(([x]) => x)));
  const [ys, highest] = range(series.flatMap(({ points }) => points.map(([, y]) => y)));
  const label = (at) => {
    caption.replaceChildren(element("b", {}, title));
    series.forEach(({ name, points }, place) => {
      if (!points.length) return;
      const point = at === null ? points.at(-1) : nearest(points, at);
      caption.append(element("span", { class: `s${place % COLOURS}` }, `${name} ${number(point[1])}`));
    });
    if (at !== null) caption.append(element("span", {}, `at step ${number(Math.round(at))}`));
  };
  label(null);
  if (xs === null || ys === null) return;
  const X = (x) => LEFT + ((x - xs[0]) / (xs[1] - xs[0])) * (WIDTH - LEFT - RIGHT);
  const Y = (y) => Math.max(0, HEIGHT - BOTTOM - ((y - ys[0]) / (ys[1] - ys[0])) * (HEIGHT - TOP - BOTTOM));
  for (const at of ticks(ys[0], ys[1], 5)) {
    svg.append(element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: Y(at), y2: Y(at) }, null, NS));
    svg.append(element("text", { x: LEFT - 6, y: Y(at) + 4, "text-anchor": "end" }, tick(at), NS));
  }
  for (const at of ticks(xs[0], xs[1], 5).filter(Number.isInteger)) {
    const anchor = X(at) > WIDTH - 20 ? "end" : "middle";
    svg.append(element("text", { x: X(at), y: HEIGHT - 5, "text-anchor": anchor }, tick(at), NS));
  }
  series.forEach(({ points, dots }, place) => {
    const kind = `s${place % COLOURS}`;
    const path = points.map(([x, y]) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join(" ");
    svg.append(element("polyline", { class: kind, points: path }, null, NS));
    if (dots || points.length === 1)
      for (const [x, y] of points) svg.append(element("circle", { class: kind, cx: X(x), cy: Y(y), r: 3 }, null, NS));
  });
  if (highest !== null)
    svg.append(element("text", { x: WIDTH - RIGHT, y: TOP + 4, "text-anchor": "end" }, `up to ${number(highest)}`, NS));
  const cursor = element("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }, null, NS);
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
    const at = xs[0] + Math.min(1, Math.max(0, share)) * (xs[1] - xs[0]);
    cursor.setAttribute("x1", X(at)); cursor.setAttribute("x2", X(at));
    cursor.setAttribute("visibility", "visible");
    label(at);
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); label(null); });
}

// How often values fall into each of `count` equal parts of their range.
export function bars(figure, title, values, count = 24) {
  const caption = element("figcaption"), xs = span(values);
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title }, null, NS);
  figure.replaceChildren(caption, svg);
  caption.append(element("b", {}, title), element("span", {}, `${number(values.length)} episodes`));
  if (xs === null) return;
  const counts = new Array(count).fill(0), width = (WIDTH - LEFT - RIGHT) / count;
  for (const value of values) counts[Math.min(count - 1, Math.floor((value - xs[0]) / (xs[1] - xs[0]) * count))] += 1;
  const most = Math.max(...counts), high = HEIGHT - TOP - BOTTOM;
  counts.forEach((found, place) => svg.append(element("rect", { class: "s0", x: LEFT + place * width, width: width - 1,
    y: TOP + high * (1 - found / most), height: high * found / most }, null, NS)));
  svg.append(element("text", { x: LEFT - 6, y: TOP + 8, "text-anchor": "end" }, tick(most), NS));
  for (const at of ticks(xs[0], xs[1], 5))
    svg.append(element("text", { x: LEFT + (at - xs[0]) / (xs[1] - xs[0]) * (WIDTH - LEFT - RIGHT), y: HEIGHT - 5, "text-anchor": "middle" }, tick(at), NS));
}

function nearest(points, at) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (points[middle][0] < at) low = middle; else high = middle; }
  return Math.abs(points[low][0] - at) <= Math.abs(points[high][0] - at) ? points[low] : points[high];
}
