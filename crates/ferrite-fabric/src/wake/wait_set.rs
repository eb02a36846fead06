//! One descriptor for everything a fabric waits for: completions, events of the connection manager
//! and of the devices, TCP sockets, wake-ups from other threads, and the timer.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use crate::error::{Error, ErrorKind};

/// An event source that became ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ready {
    /// The completion channel of the device with this index.
    Completions(usize),
    /// The asynchronous events of the device with this index.
    Device(usize),
    Cm,
    Mailbox,
    Clock,
    /// The TCP connection or TCP listener with this number.
    Socket(u64),
}

const KINDS: u64 = 6;

impl Ready {
    fn token(self) -> u64 {
        match self {
            Self::Completions(device) => device as u64 * KINDS,
            Self::Device(device) => device as u64 * KINDS + 1,
            Self::Cm => 2,
            Self::Mailbox => 3,
            Self::Clock => 4,
            Self::Socket(id) => id * KINDS + 5,
        }
    }

    fn from_token(token: u64) -> Self {
        let device = (token / KINDS) as usize;
        match token % KINDS {
            0 => Self::Completions(device),
            1 => Self::Device(device),
            2 => Self::Cm,
            3 => Self::Mailbox,
            4 => Self::Clock,
            _ => Self::Socket(token / KINDS),
        }
    }
}

pub(crate) struct WaitSet {
    epoll: OwnedFd,
    clock: OwnedFd,
}

impl WaitSet {
    pub(crate) fn new() -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let clock = if cfg!(miri) {
            // Miri has no timerfd. This eventfd never becomes readable.
            eventfd(0, EventfdFlags::NONBLOCK).map_err(system("eventfd"))?
        } else {
            timerfd_create(TimerfdClockId::Monotonic, flags).map_err(system("timerfd_create"))?
        };
        let waits = Self { epoll, clock };
        waits.add(waits.clock.as_fd(), Ready::Clock)?;
        Ok(waits)
    }

    pub(crate) fn add(&self, fd: BorrowedFd<'_>, ready: Ready) -> Result<(), Error> {
        let data = epoll::EventData::new_u64(ready.token());
        let changes_only =
            // Miri supports only edge-triggered epoll.
            if cfg!(miri) { epoll::EventFlags::ET } else { epoll::EventFlags::empty() };
        epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN | changes_only)
            .map_err(system("epoll_ctl"))
    }

    /// Adds a socket, edge-triggered. Each event is reported once, so the caller must read or write
    /// until the socket would block.
    pub(crate) fn add_socket(&self, fd: BorrowedFd<'_>, ready: Ready) -> Result<(), Error> {
        use epoll::EventFlags as Flags;
        let data = epoll::EventData::new_u64(ready.token());
        let flags = Flags::IN | Flags::OUT | Flags::RDHUP | Flags::ET;
        epoll::add(&self.epoll, fd, data, flags).map_err(system("epoll_ctl"))
    }

    /// Removes a descriptor that is still open.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd); // the descriptor may never have been added
    }

    /// Adds up to 32 event sources that are ready now to `out`, without waiting. Returns whether
    /// there may be more.
    ///
    /// The flag of an entry says whether its descriptor reports an error or a hang-up. Unless it is
    /// a socket, such a descriptor stays ready for ever.
    pub(crate) fn ready(&self, out: &mut Vec<(Ready, bool)>) -> bool {
        let mut events =
            [epoll::Event { flags: epoll::EventFlags::IN, data: epoll::EventData::new_u64(0) }; 32];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let count = epoll::wait(&self.epoll, &mut events[..], Some(&now)).unwrap_or(0);
        let failed = epoll::EventFlags::ERR | epoll::EventFlags::HUP;
        let is = |event: &epoll::Event| {
            let flags = event.flags; // the struct is packed
            (Ready::from_token(event.data.u64()), flags.intersects(failed))
        };
        out.extend(events[..count].iter().map(is));
        count == events.len()
    }

    /// Sets the timer to `deadline`, or stops it.
    pub(crate) fn set_clock(&self, deadline: Option<Instant>) {
        if cfg!(miri) {
            return;
        }
        let left = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            left.max(Duration::from_nanos(1)) // 0 would stop the timer
        });
        let left = left.unwrap_or_default();
        let it_value =
            Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        let _ = timerfd_settime(
            &self.clock,
            TimerfdTimerFlags::empty(),
            &Itimerspec { it_interval, it_value },
        );
    }

    pub(crate) fn clear_clock(&self) {
        let _ = rustix::io::read(&self.clock, &mut [0; 8]);
    }
}

impl AsFd for WaitSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

fn system(call: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
    move |errno| Error::new(ErrorKind::System, format!("{call}: {errno}"))
}
