// Shows what the process sends, and sends it what a person asks.
'use strict';
const byId = (id) => document.getElementById(id);
const BLUE = '#1f6f8b', RED = '#b3283b', GREY = '#e4e4e7';
const HIDDEN = '.mantine-Paper-root, .mantine-Notification-root, [class*="ControlPanel"]';
// Seconds of a live robot that a strip shows.
const SHOWN_S = 60;
const WORDS = { start: 'Start', pause: 'Pause', resume: 'Resume', home: 'Home', success: 'Success', failure: 'Failure' };
let hello = null, now = null, socket = null, asked = 0, playing = false;
const waiting = new Map();
let joints = [], cameras = [], strips = {};

function make(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function number(value, digits) {
  return value === null || value === undefined ? '–' : Number(value).toFixed(digits);
}

function connect() {
  socket = new WebSocket(`${location.protocol === 'https:' ? 'wss' : 'ws'}://${location.host}/live`);
  socket.binaryType = 'blob';
  socket.onmessage = (event) => {
    if (event.data instanceof Blob) picture(event.data);
    else take(JSON.parse(event.data));
  };
  socket.onclose = () => {
    badge('not connected', 'wrong');
    byId('link').textContent = 'the view has ended or is cut off; the robot goes on as it was. Trying again …';
    for (const button of document.querySelectorAll('button')) button.disabled = true;
    setTimeout(connect, 1000);
  };
}

function take(message) {
  if (message.hello) begin(message.hello);
  else if (message.reply !== undefined) answer(message);
  else {
    now = message.now;
    for (const [name, t, value, mark] of message.fresh || []) strips[name].points.push([t, value, mark]);
    if (message.offered) offer(message.offered);
    requestAnimationFrame(draw);
  }
}

// --- once for each robot

function begin(given) {
  hello = given;
  document.title = hello.title;
  byId('title').textContent = hello.title;
  byId('link').textContent = hello.live
    ? `namespace ${hello.namespace}${hello.read_only ? ', read only' : ''}` : hello.source;
  byId('view').classList.toggle('read-only', hello.read_only);
  byId('view').classList.toggle('bag', !hello.live);
  byId('timeline').hidden = hello.live;
  if (!hello.live) {
    Object.assign(byId('at'), { max: hello.length_s, disabled: false });
    byId('play').disabled = false;
  }
  const buttons = hello.actions.filter((name) => name !== 'stop').map((name) => {
    const button = make('button', '', WORDS[name]);
    button.dataset.action = name;
    button.onclick = () => ask({ do: name }, WORDS[name]);
    return button;
  });
  byId('actions').replaceChildren(...buttons);
  beginScene();
  beginCameras();
  beginJoints();
  beginStrips();
  offer(hello.offered);
}

function beginScene() {
  const box = document.querySelector('.scene');
  const old = box.querySelector('iframe');
  if (old) old.remove();
  box.classList.toggle('none', Boolean(hello.no_scene));
  byId('no_scene').textContent = hello.no_scene;
  byId('scene_legend').hidden = Boolean(hello.no_scene);
  byId('scene_note').textContent = hello.scene_note;
  if (hello.no_scene) return;
  const frame = make('iframe');
  frame.title = 'robot in three dimensions';
  frame.src = '/scene/';
  frame.onload = () => {
    // What is typed in the scene does not come to this page.
    frame.contentWindow.addEventListener('keydown', stopByKey, true);
    // The scene is looked at: its own panel has nothing to set, and this page says what is wrong.
    const style = make('style', '', `${HIDDEN} { display: none !important; }`);
    frame.contentDocument.head.append(style);
  };
  box.append(frame);
}

function beginCameras() {
  cameras = hello.cameras.map((camera) => {
    const image = make('img'), age = make('span', 'figure'), rate = make('span', 'figure'), problem = make('span', 'bad');
    image.alt = `camera ${camera.name}`;
    const caption = make('figcaption');
    caption.append(make('b', '', camera.name), age, rate, problem);
    const figure = make('figure');
    figure.title = camera.topic;
    figure.append(image, caption);
    return { figure, image, age, rate, problem };
  });
  byId('cameras').replaceChildren(...cameras.map((one) => one.figure));
  if (!cameras.length) byId('cameras').append(make('p', 'note', hello.no_cameras));
}

function beginJoints() {
  joints = hello.joints.map((joint) => {
    const row = make('div', 'joint'), value = make('span', 'value'), limited = make('span', 'limited');
    const track = make('div', 'track'), at = make('i'), to = make('b');
    track.append(at, to);
    const bound = (side) => {
      const known = joint[side] !== null && joint[side] !== undefined;
      return make('span', `limit ${side}`, known ? number(joint[side], 2) : '');
    };
    row.append(make('span', '', joint.name), bound('lower'), track, bound('upper'), value, limited);
    return { row, value, at, to, track, limited, joint };
  });
  byId('joints').replaceChildren(...joints.map((one) => one.row));
  if (!joints.length) byId('joints').append(make('p', 'note', 'no joint states yet'));
}

function beginStrips() {
  strips = {};
  const made = Object.entries(hello.strips).map(([name, strip]) => {
    const box = make('div', 'strip'), value = make('b'), canvas = make('canvas');
    box.append(value, `${strip.title}, ${strip.unit}${strip.mark ? ` (red: ${strip.mark})` : ''}`, canvas);
    strips[name] = { canvas, value, points: hello.history[name] || [] };
    return box;
  });
  byId('strips').replaceChildren(...made);
}

// --- what a person asks

function ask(command, what) {
  const id = ++asked;
  waiting.set(id, { what, since: performance.now() });
  socket.send(JSON.stringify({ ...command, id }));
  say(`${what} …`, false);
}

function answer(reply) {
  const { what, since } = waiting.get(reply.reply) || { what: '', since: performance.now() };
  waiting.delete(reply.reply);
  if (!what) return;
  const took = `${Math.round(performance.now() - since)} ms`;
  say(`${what}: ${reply.text || (reply.ok ? 'done' : 'refused')} (${took})`, !reply.ok);
}

function say(text, bad) {
  byId('said').textContent = text;
  byId('said').classList.toggle('bad', bad);
}

function offer(names) {
  const offered = new Set(names);
  byId('stop').disabled = !offered.has('stop');
  for (const button of byId('actions').children) {
    const there = offered.has(button.dataset.action);
    button.disabled = !there;
    button.title = there ? '' : 'no node in the graph offers this now';
  }
  for (const [id, name] of [['instruct', 'instruction'], ['replan', 'replan_interval'], ['guide', 'cfg_beta']]) {
    for (const part of byId(id).querySelectorAll('input, button')) part.disabled = !offered.has(name);
  }
}

function stopByKey(event) {
  if (event.key === 'Escape' && hello && hello.live && !byId('stop').disabled) ask({ do: 'stop' }, 'Stop');
}

function setting(form, name, what) {
  byId(form).addEventListener('submit', (event) => {
    event.preventDefault();
    const input = byId(name);
    ask({ do: 'set', name, value: input.type === 'number' ? Number(input.value) : input.value }, what);
    input.blur();
  });
}

// A field that a person is typing in is left alone.
function fill(name, value) {
  const input = byId(name);
  const has = value !== null && value !== undefined && value !== '';
  if (document.activeElement !== input && has && input.dataset.shown !== String(value)) {
    input.value = input.dataset.shown = String(value);
  }
}

// --- every time

function badge(text, kind) {
  byId('mode').textContent = text;
  byId('mode').className = `badge ${kind}`;
}

function draw() {
  if (!now || !hello) return;
  const kind = now.state === 'moving' ? 'moving' : now.state === 'held' || now.state.startsWith('ready') ? 'held' : 'wrong';
  badge(now.dry_run ? `${now.state}, dry run` : now.state.replace(': call ~/start', ''), kind);
  drawWhy();
  fill('instruction', now.instruction);
  fill('replan_interval', now.replan_interval);
  fill('cfg_beta', now.beta);
  now.cameras.forEach((camera, i) => drawCamera(cameras[i], camera));
  now.joints.forEach((value, i) => { if (joints[i]) drawJoint(joints[i], value); });
  for (const name in strips) drawStrip(strips[name]);
  drawNodes();
  if (!hello.live) {
    byId('at').value = now.t - hello.begin_s;
    byId('clock').textContent = `${number(now.t - hello.begin_s, 1)} of ${number(hello.length_s, 1)} s`;
    playing = now.playing;
    byId('play').textContent = playing ? 'Pause' : 'Play';
  }
}

function drawWhy() {
  const text = now.why || now.doing || '';
  const box = byId('why');
  if (box.dataset.text === text + now.remedy) return;
  box.dataset.text = text + now.remedy;
  box.replaceChildren(text);
  if (now.remedy) {
    const link = make('a', '', 'what to do');
    link.href = `/pages/${now.remedy.replace(/^docs\//, '')}`;
    link.target = '_blank';
    box.append(' – ', link);
  }
}

function drawCamera(parts, camera) {
  if (!parts) return;
  const ms = camera.age_ms;
  parts.age.textContent = ms === null ? 'no frame yet' : ms < 1000 ? `${ms} ms old` : `${number(ms / 1000, 1)} s old`;
  parts.age.classList.toggle('bad', ms === null || ms > 1000);
  parts.rate.textContent = camera.rate_hz === null ? '' : `${number(camera.rate_hz, 1)} Hz`;
  parts.problem.textContent = camera.problem;
}

async function picture(blob) {
  const index = new Uint8Array(await blob.slice(0, 1).arrayBuffer())[0];
  const parts = cameras[index];
  if (!parts) return;
  // A slow browser shows fewer pictures, not none.
  if (parts.busy) return;
  parts.busy = true;
  const next = new Image(), url = URL.createObjectURL(blob.slice(1, blob.size, 'image/jpeg'));
  next.alt = parts.image.alt;
  next.src = url;
  try {
    await next.decode();
    parts.image.replaceWith(next);
    parts.image = next;
  } catch { /* a damaged picture: the one before stays */ }
  URL.revokeObjectURL(url);
  parts.busy = false;
}

function drawJoint(parts, value) {
  const { joint, at, to, track } = parts;
  parts.value.textContent = `${number(value.at, 3)} ${joint.unit}`;
  const low = joint.lower ?? (joint.continuous ? -Math.PI : null), high = joint.upper ?? (joint.continuous ? Math.PI : null);
  const known = low !== null && low !== undefined && high !== null && high !== undefined && high > low;
  track.style.visibility = known ? '' : 'hidden';
  const place = (x) => `${Math.min(Math.max((x - low) / (high - low), 0), 1) * 100}%`;
  at.hidden = value.at === null;
  to.hidden = value.to === null;
  if (known && value.at !== null) {
    at.style.left = place(value.at);
    const margin = 0.02 * (high - low);
    at.classList.toggle('near', !joint.continuous && (value.at < low + margin || value.at > high - margin));
  }
  if (known && value.to !== null) to.style.left = place(value.to);
  const ticks = Object.entries(value.limited).map(([by, count]) => `${by} ${count}`);
  parts.limited.textContent = ticks.length ? `ticks that a limit changed: ${ticks.join(', ')}` : '';
}

function drawStrip(strip) {
  const { canvas } = strip;
  const width = canvas.clientWidth, height = canvas.clientHeight, scale = window.devicePixelRatio || 1;
  if (!width) return;
  if (canvas.width !== Math.round(width * scale)) Object.assign(canvas, { width: width * scale, height: height * scale });
  const end = hello.live ? now.t : hello.begin_s + hello.length_s;
  const begin = hello.live ? end - SHOWN_S : hello.begin_s;
  if (hello.live) strip.points = strip.points.filter((point) => point[0] >= begin - 1);
  const points = strip.points;
  let high = 0, newest = null;
  for (const point of points) {
    high = Math.max(high, point[1]);
    if (point[0] <= now.t + 0.01) newest = point[1];
  }
  strip.value.textContent = newest === null ? '–' : String(Number(newest.toPrecision(3)));
  const pen = canvas.getContext('2d');
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  const top = high || 1;
  const x = (t) => (t - begin) / Math.max(end - begin, 0.1) * width, y = (v) => height - 1 - v / top * (height - 15);
  pen.strokeStyle = GREY;
  pen.strokeRect(0, height - 0.5, width, 0);
  pen.fillStyle = '#88888d';
  pen.font = '10px system-ui, sans-serif';
  pen.fillText(String(Number(high.toPrecision(2))), 0, 10);
  pen.strokeStyle = pen.fillStyle = BLUE;
  pen.lineWidth = 1.2;
  pen.beginPath();
  points.forEach(([t, v], i) => (i ? pen.lineTo(x(t), y(v)) : pen.moveTo(x(t), y(v))));
  pen.stroke();
  for (const [t, v, mark] of points) {
    if (!mark) continue;
    pen.fillStyle = RED;
    pen.fillRect(x(t) - 1.5, y(v) - 1.5, 3, 3);
  }
  if (!hello.live) {
    pen.strokeStyle = '#1d1d1f';
    pen.strokeRect(x(now.t), 0, 0, height);
  }
}

function drawNodes() {
  const text = JSON.stringify(now.nodes);
  if (byId('nodes').dataset.text === text) return;
  byId('nodes').dataset.text = text;
  const table = make('table');
  for (const node of now.nodes) {
    const row = make('tr');
    row.append(make('td', '', node.name), make('td', '', node.lifecycle), make('td', 'bad', node.problems.join('; ')));
    table.append(row);
  }
  byId('nodes').replaceChildren(now.nodes.length ? table : make('p', 'note', 'no node of vla_runtime is heard'));
}

setting('instruct', 'instruction', 'Instruction');
setting('replan', 'replan_interval', 'Replan interval');
setting('guide', 'cfg_beta', 'CFG beta');
byId('stop').onclick = () => ask({ do: 'stop' }, 'Stop');
document.addEventListener('keydown', stopByKey, true);
byId('at').oninput = (event) => socket.send(JSON.stringify({ do: 'seek', at: Number(event.target.value) }));
byId('play').onclick = () => socket.send(JSON.stringify({ do: playing ? 'pause' : 'play' }));
connect();
