// Writes and reads numbered values of a cluster, with the commands of one client of Node.js.
'use strict';

const WORKERS = 3;
const pause = () => new Promise((resolve) => setTimeout(resolve, 20));
const say = (...words) => process.stdout.write(words.join(' ') + '\n');
const value = (number) => `${number}:` + 'x'.repeat(number % 50 === 0 ? 100000 : number % 700);

function check(what, found, expected) {
  if (found !== expected) {
    say('wrong', what, String(found).slice(0, 40), 'instead of', String(expected).slice(0, 40));
  }
}

async function work(cluster, prefix, worker, state) {
  const counter = `${prefix}:${worker}:counter`;
  const written = new Map();
  let number = 0;
  while (!state.stop) {
    try {
      if (number === null) number = Number((await cluster.get(counter)) || 0);
      const key = `${prefix}:${worker}:${number % 100}`;
      number += 1;
      check(counter, await cluster.incr(counter), number);
      written.delete(key);
      check(`SET ${key}`, await cluster.set(key, value(number)), 'OK');
      written.set(key, value(number));
      check(`GET ${key}`, await cluster.get(key), value(number));
      say('round', worker);
    } catch (error) {
      number = null;
      say('error', error.name, String(error.message).replace(/\s+/g, ' '));
    }
    await pause();
  }
  for (const [key, last] of written) check(`last GET ${key}`, await cluster.get(key), last);
}

// Works until standard input is closed. `cluster` has the functions get, set, incr and quit.
module.exports = async function run(cluster, prefix) {
  const state = { stop: false };
  process.stdin.resume().on('end', () => { state.stop = true; });
  const workers = [];
  for (let worker = 0; worker < WORKERS; worker += 1) {
    workers.push(work(cluster, prefix, worker, state));
  }
  await Promise.all(workers);
  await cluster.quit();
  say('end');
};
module.exports.error = (error) => say('error', 'event', error.name, error.message);
