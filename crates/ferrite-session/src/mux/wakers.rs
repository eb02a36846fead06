//! Which streams have something to do. Each local connection is polled with a waker of its own, so
//! that the driver looks only at connections that are ready.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use ferrite_proto::mux::StreamId;

/// The streams that were woken, shared by the wakers and the driver.
#[derive(Debug, Default)]
pub(super) struct Woken(Mutex<List>);

#[derive(Debug, Default)]
struct List {
    streams: Vec<Arc<StreamWaker>>,
    /// Wakes the driver.
    task: Option<Waker>,
}

/// Wakes one stream.
#[derive(Debug)]
pub(super) struct StreamWaker {
    pub(super) stream: StreamId,
    /// Whether the stream is in the list.
    is_woken: AtomicBool,
    woken: Arc<Woken>,
}

impl Woken {
    /// Returns a waker for a stream.
    pub(super) fn waker(self: &Arc<Self>, stream: StreamId) -> Waker {
        let woken = Arc::clone(self);
        Waker::from(Arc::new(StreamWaker { stream, is_woken: AtomicBool::new(false), woken }))
    }

    /// Sets the waker of the driver's task.
    pub(super) fn set_task(&self, task: &Waker) {
        let mut list = self.lock();
        if !list.task.as_ref().is_some_and(|known| known.will_wake(task)) {
            list.task = Some(task.clone());
        }
    }

    /// Moves the woken streams into `streams`.
    pub(super) fn take(&self, streams: &mut Vec<StreamId>) {
        let mut list = self.lock();
        for waker in list.streams.drain(..) {
            // A wake from now on is for something that the driver has not seen.
            waker.is_woken.store(false, Ordering::SeqCst);
            streams.push(waker.stream);
        }
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for StreamWaker {
    fn wake(self: Arc<Self>) {
        if self.is_woken.swap(true, Ordering::SeqCst) {
            return;
        }
        let woken = Arc::clone(&self.woken);
        let task = {
            let mut list = woken.lock();
            list.streams.push(self);
            list.task.clone()
        };
        if let Some(task) = task {
            task.wake(); // without the lock, since waking may run anything
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrite_proto::mux::{Class, Side};

    use super::*;

    #[test]
    fn a_stream_is_listed_once_until_it_was_taken() {
        let woken = Arc::new(Woken::default());
        let [one, two] =
            [1, 2].map(|number| StreamId::new(Side::Caller, Class::Bus, number).expect("an id"));
        let (first, second) = (woken.waker(one), woken.waker(two));
        first.wake_by_ref();
        second.wake_by_ref();
        first.wake_by_ref();
        let mut streams = Vec::new();
        woken.take(&mut streams);
        assert_eq!(streams, [one, two]);
        streams.clear();
        woken.take(&mut streams);
        assert_eq!(streams, []);
        first.wake();
        woken.take(&mut streams);
        assert_eq!(streams, [one]);
    }
}
