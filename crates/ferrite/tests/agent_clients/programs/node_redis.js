// Runs work.js with node-redis, without its packages for modules. `../program.rs` starts it.
'use strict';

const { createCluster } = require('@redis/client');
const run = require('./work.js');

const [host, port, password, prefix] = process.argv.slice(2);
const cluster = createCluster({
  rootNodes: [{ url: `redis://${host}:${port}` }],
  defaults: { password },
});
cluster.on('error', run.error);
cluster.on('node-error', run.error);
cluster.connect().then(() => run({
  get: (key) => cluster.get(key),
  set: (key, value) => cluster.set(key, value),
  incr: (key) => cluster.incr(key),
  quit: () => cluster.close(),
}, prefix));
