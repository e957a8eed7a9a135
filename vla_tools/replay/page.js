// Draws the page of a replay from the data that the page itself holds.
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const all = data.inferences;
const byId = (id) => document.getElementById(id);
const RECORDED = '#1f6f8b', REPLAYED = '#d1495b', SEAM = '#c8c8cc', LATE = '#e09f3e';
const PALETTE = ['#1f6f8b', '#d1495b', '#4f9d69', '#8c6bb1', '#e09f3e', '#7f7f7f'];

function element(name, attributes, text) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Numbers of a whole recording are too many to be the arguments of one call.
function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

// Round numbers within a range, four to six of them in most.
function ticks([low, high]) {
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((one) => one * power >= rough * 0.999);
  const made = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) made.push(i * step);
  return made;
}

function short(value) { return value === null ? '–' : String(Number(value.toPrecision(3))); }

// A plot with axes; x and y turn numbers into places.
function plot(width, height, xs, ys, title) {
  const left = 52, right = 24, top = 20, bottom = 26;
  const svg = element('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img' });
  const x = (value) => left + (value - xs[0]) / (xs[1] - xs[0]) * (width - left - right);
  const y = (value) => height - bottom - (value - ys[0]) / (ys[1] - ys[0]) * (height - top - bottom);
  svg.append(element('text', { x: left, y: 13 }, title));
  for (const at of ticks(ys)) {
    svg.append(element('line', { x1: left, x2: width - right, y1: y(at), y2: y(at), stroke: '#eee' }));
    svg.append(element('text', { x: left - 5, y: y(at) + 4, 'text-anchor': 'end' }, short(at)));
  }
  for (const at of ticks(xs)) {
    svg.append(element('text', { x: x(at), y: height - 8, 'text-anchor': 'middle' }, short(at)));
  }
  return { svg, x, y, top, low: height - bottom };
}

function path(points, colour, width) {
  const text = points.map((p, i) => `${i ? 'L' : 'M'}${p[0].toFixed(1)} ${p[1].toFixed(1)}`).join('');
  return element('path', { d: text || 'M0 0', stroke: colour, 'stroke-width': width, fill: 'none' });
}

function dots(svg, points, colour, radius) {
  for (const p of points) svg.append(element('circle', { cx: p[0], cy: p[1], r: radius, fill: colour }));
}

const narrow = window.innerWidth < 700;
const wide = narrow ? 420 : 1100;
let marker = null, timePlot = null;

function drawTime() {
  const times = range([...all.map((one) => one.t), ...data.handovers.map((one) => one.t)]);
  const values = all.flatMap((one) => [one.ms, one.ms2]).filter((v) => Number.isFinite(v));
  timePlot = plot(wide, narrow ? 190 : 230, times, [0, range([0, ...values])[1]],
    'latency, ms: recorded blue, replayed red; over time, s');
  const { svg, x, y, top, low } = timePlot;
  for (const hold of data.holds) {
    const begin = Math.max(x(hold.t), x(times[0])), end = Math.min(x(hold.end), x(times[1]));
    if (end <= begin) continue;
    const band = element('rect', { x: begin, y: top, width: end - begin, height: low - top,
      fill: '#e4e4e7', opacity: 0.7 });
    band.append(element('title', {}, hold.text));
    svg.append(band);
  }
  for (const handover of data.handovers) {
    const line = element('line', { x1: x(handover.t), x2: x(handover.t), y1: top, y2: low,
      stroke: handover.late ? LATE : SEAM, 'stroke-width': 0.7 });
    line.append(element('title', {}, handover.text));
    svg.append(line);
  }
  const having = (key) => all.filter((one) => Number.isFinite(one[key])).map((one) => [x(one.t), y(one[key])]);
  dots(svg, having('ms'), RECORDED, 2.5);
  dots(svg, having('ms2'), REPLAYED, 1.8);
  marker = element('line', { y1: top, y2: low, stroke: '#1d1d1f', 'stroke-width': 1.5 });
  svg.append(marker);
  svg.addEventListener('click', (event) => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) * wide / box.width;
    let nearest = 0;
    all.forEach((one, i) => {
      if (Math.abs(x(one.t) - at) < Math.abs(x(all[nearest].t) - at)) nearest = i;
    });
    choose(nearest);
  });
  byId('time').append(svg);
}

function drawAges() {
  const sources = [...new Set(all.flatMap((one) => Object.keys(one.ages)))];
  const values = all.flatMap((one) => Object.values(one.ages)).filter((v) => v !== null);
  const made = plot(wide, narrow ? 170 : 190, range(all.map((one) => one.t)), [0, range([0, ...values])[1]],
    'age, ms, when the inference began');
  sources.forEach((source, i) => {
    const points = all.filter((one) => Number.isFinite(one.ages[source]))
      .map((one) => [made.x(one.t), made.y(one.ages[source])]);
    made.svg.append(path(points, PALETTE[i % PALETTE.length], 1));
    dots(made.svg, points, PALETTE[i % PALETTE.length], 1.5);
    const place = { x: wide - 90, y: 13 + 13 * i, style: `fill: ${PALETTE[i % PALETTE.length]}` };
    made.svg.append(element('text', place, source));
  });
  byId('ages').append(made.svg);
}

function table(id, heads, rows, none) {
  const place = byId(id);
  if (!rows.length) { place.textContent = none; return; }
  const made = document.createElement('table');
  for (const [kind, cells] of [['th', heads], ...rows.map((row) => ['td', row])]) {
    const row = made.insertRow();
    for (const cell of cells) {
      const one = document.createElement(kind);
      one.textContent = cell;
      row.append(one);
    }
  }
  place.append(made);
}

function facts(one) {
  const place = byId('facts');
  place.replaceChildren();
  const lines = [
    `${one.t.toFixed(2)} s: inference ${one.number} of episode ${one.episode}, '${one.instruction}'`,
    `latency ${one.ms ?? '–'} ms recorded, ${one.ms2 ?? '–'} ms replayed; beta ${one.beta}; ` +
      `real-time chunking ${one.rtc}`,
    `cache: ${one.cache}`,
  ];
  for (const line of lines) {
    const made = document.createElement('div');
    made.textContent = line;
    place.append(made);
  }
  const verdict = document.createElement('div');
  if (one.note) { verdict.textContent = one.note; verdict.className = 'bad'; }
  if (one.identical === true) { verdict.textContent = 'bit-identical ' + one.note; verdict.className = 'good'; }
  if (one.identical === false) {
    verdict.textContent = `largest difference ${one.error} ${one.note}`;
    verdict.className = 'bad';
  }
  place.append(verdict);
}

function images(one) {
  const place = byId('images');
  place.replaceChildren();
  for (const name in one.images) {
    const figure = document.createElement('figure'), image = document.createElement('img');
    const caption = document.createElement('figcaption');
    image.src = one.images[name];
    image.alt = name;
    caption.textContent = name;
    figure.append(image, caption);
    place.append(figure);
  }
}

const column = (rows, index) => (rows || []).map((row) => row[index]);
const ranges = data.joints.map((_, index) =>
  range(all.flatMap((one) => [...column(one.recorded, index), ...column(one.replayed, index)])));

function joints(one) {
  const place = byId('joints');
  place.replaceChildren();
  data.joints.forEach((name, index) => {
    const recorded = column(one.recorded, index), replayed = column(one.replayed, index);
    const steps = Math.max(recorded.length, replayed.length, 2);
    const made = plot(420, 190, [0, steps - 1], ranges[index], `${name}, ${data.units[index]}`);
    const points = (of) => of.map((v, i) => [i, v]).filter(([, v]) => Number.isFinite(v))
      .map(([i, v]) => [made.x(i), made.y(v)]);
    made.svg.append(path(points(recorded), RECORDED, 1.6));
    dots(made.svg, points(replayed), REPLAYED, 2);
    place.append(made.svg);
  });
}

function choose(index) {
  const one = all[index];
  byId('at').value = index;
  if (!one) return;
  const place = timePlot.x(one.t);
  marker.setAttribute('x1', place);
  marker.setAttribute('x2', place);
  facts(one);
  images(one);
  joints(one);
}

drawTime();
drawAges();
table('holds', ['from, s', 'to, s', 'reason', 'in words'],
  data.holds.map((one) => [one.t.toFixed(2), one.end.toFixed(2), one.reason, one.text]), 'None was recorded.');
table('handovers', ['at, s', 'largest jump', 'in words'],
  data.handovers.map((one) => [one.t.toFixed(2), short(one.jump), one.text]), 'None was recorded.');
const slider = byId('at');
slider.max = Math.max(0, all.length - 1);
slider.addEventListener('input', () => choose(Number(slider.value)));
choose(0);
