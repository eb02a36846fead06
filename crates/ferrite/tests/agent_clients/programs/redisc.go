// Writes and reads numbered values of a cluster with redisc and redigo, as a static binary.
// `../program.rs` starts it.
package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gomodule/redigo/redis"
	"github.com/mna/redisc"
)

const workers = 3

var output sync.Mutex

func say(format string, values ...interface{}) {
	output.Lock()
	defer output.Unlock()
	fmt.Println(strings.Join(strings.Fields(fmt.Sprintf(format, values...)), " "))
}

func value(number int) string {
	if number%50 == 0 {
		return fmt.Sprintf("%d:%s", number, strings.Repeat("x", 100000))
	}
	return fmt.Sprintf("%d:%s", number, strings.Repeat("x", number%700))
}

func check(what, found, expected string) {
	if found != expected {
		say("wrong %s %.40s instead of %.40s", what, found, expected)
	}
}

// do runs one command. The connection follows redirects, and returns to its pool afterwards.
func do(cluster *redisc.Cluster, command string, words ...interface{}) (string, error) {
	connection := cluster.Get()
	defer connection.Close()
	retrying, err := redisc.RetryConn(connection, 3, 100*time.Millisecond)
	if err != nil {
		return "", err
	}
	reply, err := retrying.Do(command, words...)
	if number, isNumber := reply.(int64); isNumber {
		return fmt.Sprint(number), err
	}
	return redis.String(reply, err)
}

func work(cluster *redisc.Cluster, prefix string, worker int, stop *int32) {
	counter := fmt.Sprintf("%s:%d:counter", prefix, worker)
	number, written := 0, map[string]string{}
	round := func() error {
		if number < 0 {
			text, err := do(cluster, "GET", counter)
			if err != nil && err != redis.ErrNil {
				return err
			}
			number = 0
			fmt.Sscan(text, &number)
		}
		key := fmt.Sprintf("%s:%d:%d", prefix, worker, number%100)
		number++
		reply, err := do(cluster, "INCR", counter)
		if err != nil {
			return err
		}
		check(counter, reply, fmt.Sprint(number))
		delete(written, key)
		if reply, err = do(cluster, "SET", key, value(number)); err != nil {
			return err
		}
		check("SET "+key, reply, "OK")
		written[key] = value(number)
		if reply, err = do(cluster, "GET", key); err != nil {
			return err
		}
		check("GET "+key, reply, written[key])
		say("round %d", worker)
		return nil
	}
	for atomic.LoadInt32(stop) == 0 {
		if err := round(); err != nil {
			number = -1
			say("error %T %v", err, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	for key, last := range written {
		reply, err := do(cluster, "GET", key)
		if err != nil {
			say("error %T %v", err, err)
			continue
		}
		check("last GET "+key, reply, last)
	}
}

func main() {
	node, password, prefix := os.Args[1]+":"+os.Args[2], os.Args[3], os.Args[4]
	cluster := &redisc.Cluster{
		StartupNodes: []string{node},
		DialOptions:  []redis.DialOption{redis.DialPassword(password)},
		CreatePool: func(address string, options ...redis.DialOption) (*redis.Pool, error) {
			dial := func() (redis.Conn, error) { return redis.Dial("tcp", address, options...) }
			return &redis.Pool{MaxIdle: workers, Dial: dial}, nil
		},
	}
	if err := cluster.Refresh(); err != nil {
		say("error %T %v", err, err)
	}
	var stop int32
	var running sync.WaitGroup
	for worker := 0; worker < workers; worker++ {
		running.Add(1)
		go func(worker int) {
			defer running.Done()
			work(cluster, prefix, worker, &stop)
		}(worker)
	}
	io.Copy(io.Discard, bufio.NewReader(os.Stdin))
	atomic.StoreInt32(&stop, 1)
	running.Wait()
	say("end")
}
