// Runs the page's script (first argument) without a browser: presses keys in the page and in its
// scene, and prints as JSON what each key sent.
'use strict';
const fs = require('fs'), vm = require('vm');

function element(tag) {
  const heard = [];
  return {
    tag, dataset: {}, style: {}, children: [], classList: { toggle() {} },
    addEventListener: (kind, call) => { if (kind === 'keydown') heard.push(call); },
    press: (key) => heard.forEach((call) => call({ key })),
    append() {}, replaceChildren() {}, remove() {},
    querySelector: () => null, querySelectorAll: () => [],
  };
}

const known = {}, sent = [];
let frame = null, socket = null;
globalThis.document = Object.assign(element('document'), {
  getElementById: (id) => (known[id] ||= element(id)),
  querySelector: () => element('div'),
  createElement: (tag) => {
    const made = element(tag);
    if (tag === 'iframe') frame = Object.assign(made, { contentWindow: element('window'), contentDocument: { head: element('head') } });
    return made;
  },
});
globalThis.location = { protocol: 'http:', host: 'localhost' };
globalThis.WebSocket = class {
  constructor() { socket = this; }

  send(text) { sent.push(JSON.parse(text).do); }
};
vm.runInThisContext(fs.readFileSync(process.argv[2], 'utf8'));
const hello = {
  title: '', live: true, read_only: false, namespace: '', actions: ['stop'], offered: ['stop'], no_scene: '', scene_note: '',
  cameras: [], no_cameras: '', joints: [], strips: {}, history: {},
};
socket.onmessage({ data: JSON.stringify({ hello }) });
frame.onload();
const found = {};
for (const [where, it] of [['page', document], ['scene', frame.contentWindow]]) {
  for (const key of ['a', 'Escape']) {
    sent.length = 0;
    it.press(key);
    found[`${key} in the ${where}`] = [...sent];
  }
}
console.log(JSON.stringify(found));
