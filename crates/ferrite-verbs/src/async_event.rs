//! Events that a device reports outside of any request: port changes, broken queues, removal of the
//! device.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::io::Errno;

use crate::code::codes;
use crate::context::{Context, wait_readable};
use crate::cq::CqKey;
use crate::error::{Error, last_errno};
use crate::sys;

/// An event of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncEvent {
    /// What happened.
    pub kind: AsyncEventKind,
    /// The object that it happened to.
    pub subject: Subject,
}

/// The object of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Subject {
    /// The queue pair with this number.
    QueuePair(u32),
    /// The completion queue with this key.
    CompletionQueue(CqKey),
    /// A shared receive queue.
    SharedReceiveQueue,
    /// The port with this number.
    Port(u8),
    /// The device itself. Also the subject of every kind of event that this version does not know.
    Device,
}

codes! {
    /// What happened.
    pub struct AsyncEventKind, unknown: "unknown event" {
        /// Completions are lost, and the queue is unusable.
        CQ_ERROR = sys::ibv_event_type::IBV_EVENT_CQ_ERR.0, "completion queue overran";
        /// Everything posted to the queue pair is flushed.
        QP_FATAL = sys::ibv_event_type::IBV_EVENT_QP_FATAL.0, "queue pair failed";
        /// The peer asked for something that this queue pair does not allow.
        QP_REQUEST_ERROR = sys::ibv_event_type::IBV_EVENT_QP_REQ_ERR.0,
            "queue pair refused a request from the peer";
        /// The peer used a wrong key or address.
        QP_ACCESS_ERROR = sys::ibv_event_type::IBV_EVENT_QP_ACCESS_ERR.0,
            "queue pair refused an access from the peer";
        /// The first packet arrived before the handshake ended.
        ESTABLISHED = sys::ibv_event_type::IBV_EVENT_COMM_EST.0, "connection is established";
        /// All sends posted before the drain request are done.
        SEND_QUEUE_DRAINED = sys::ibv_event_type::IBV_EVENT_SQ_DRAINED.0, "send queue is drained";
        /// The device is unusable. The program must close everything on it.
        DEVICE_FATAL = sys::ibv_event_type::IBV_EVENT_DEVICE_FATAL.0,
            "device failed or was removed";
        /// Traffic can pass.
        PORT_ACTIVE = sys::ibv_event_type::IBV_EVENT_PORT_ACTIVE.0, "port came up";
        /// Traffic cannot pass.
        PORT_ERROR = sys::ibv_event_type::IBV_EVENT_PORT_ERR.0, "port went down";
        /// See [`Context::gids`].
        GID_CHANGE = sys::ibv_event_type::IBV_EVENT_GID_CHANGE.0, "addresses of the port changed";
        /// The receives in the queue are lost.
        SRQ_ERROR = sys::ibv_event_type::IBV_EVENT_SRQ_ERR.0, "shared receive queue failed";
        /// See [`crate::SharedReceiveQueue::arm_limit`].
        SRQ_LIMIT = sys::ibv_event_type::IBV_EVENT_SRQ_LIMIT_REACHED.0,
            "shared receive queue fell below its limit";
        /// The queue pair failed and takes nothing more from its shared receive queue.
        LAST_RECEIVE = sys::ibv_event_type::IBV_EVENT_QP_LAST_WQE_REACHED.0,
            "queue pair takes no more shared receives";
    }
}

impl Context {
    /// Returns the next event of the device, without waiting.
    ///
    /// # Errors
    /// If the device was removed.
    pub fn next_async_event(&self) -> Result<Option<AsyncEvent>, Error> {
        let ibv = self.verbs().ibv;
        let mut raw = sys::ibv_async_event::default();
        // SAFETY: the context is open and `raw` is valid for the write.
        if unsafe { (ibv.ibv_get_async_event)(self.raw(), &raw mut raw) } != 0 {
            return match last_errno() {
                Errno::AGAIN | Errno::INTR => Ok(None),
                errno => Err(Error::os("ibv_get_async_event", errno, self.device().name())),
            };
        }
        // SAFETY: the event was just filled.
        let event = unsafe { AsyncEvent::from_raw(&raw) };
        // SAFETY: the event was fetched above and is acknowledged once. Destroying the subject
        // waits for the acknowledgement, so the subject was alive while `from_raw` read it.
        unsafe { (ibv.ibv_ack_async_event)(&raw mut raw) };
        Ok(Some(event))
    }

    /// Returns the next event, waiting up to `timeout`; `None` if `timeout` passed, or if another
    /// thread took the event.
    ///
    /// # Errors
    /// If the device was removed.
    pub fn wait_async_event(&self, timeout: Duration) -> Result<Option<AsyncEvent>, Error> {
        match self.next_async_event()? {
            Some(event) => Ok(Some(event)),
            None if wait_readable(self.as_fd(), timeout)? => self.next_async_event(),
            None => Ok(None),
        }
    }
}

impl AsyncEvent {
    /// Converts an event of libibverbs.
    ///
    /// # Safety
    /// `raw` was filled by ibv_get_async_event and is not acknowledged yet.
    unsafe fn from_raw(raw: &sys::ibv_async_event) -> Self {
        let kind = AsyncEventKind(raw.event_type.0);
        // SAFETY: the kind says which member of the union is set, and the object it points to
        // cannot be destroyed before the event is acknowledged.
        let subject = unsafe {
            match kind {
                AsyncEventKind::CQ_ERROR => {
                    Subject::CompletionQueue(CqKey((*raw.element.cq).cq_context.addr()))
                }
                AsyncEventKind::QP_FATAL
                | AsyncEventKind::QP_REQUEST_ERROR
                | AsyncEventKind::QP_ACCESS_ERROR
                | AsyncEventKind::ESTABLISHED
                | AsyncEventKind::SEND_QUEUE_DRAINED
                | AsyncEventKind::LAST_RECEIVE => Subject::QueuePair((*raw.element.qp).qp_num),
                AsyncEventKind::SRQ_ERROR | AsyncEventKind::SRQ_LIMIT => {
                    Subject::SharedReceiveQueue
                }
                AsyncEventKind::PORT_ACTIVE
                | AsyncEventKind::PORT_ERROR
                | AsyncEventKind::GID_CHANGE => {
                    Subject::Port(u8::try_from(raw.element.port_num).unwrap_or(0))
                }
                _ => Subject::Device,
            }
        };
        Self { kind, subject }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_event_has_the_device_as_its_subject() {
        let raw =
            sys::ibv_async_event { event_type: sys::ibv_event_type(321), ..Default::default() };
        // SAFETY: for an unknown type, no member of the union is read.
        let event = unsafe { AsyncEvent::from_raw(&raw) };
        assert_eq!(event.subject, Subject::Device);
        assert_eq!(event.kind.to_string(), "unknown event 321");
    }
}
