// Runs work.js with ioredis. `../program.rs` starts it.
'use strict';

const { Cluster } = require('ioredis');
const run = require('./work.js');

const [host, port, password, prefix] = process.argv.slice(2);
const cluster = new Cluster([{ host, port: Number(port) }], { redisOptions: { password } });
cluster.on('error', run.error);
cluster.on('node error', run.error);
run(cluster, prefix);
