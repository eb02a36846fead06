//! The RDMA half of a listener. If it listens on the address of a device, it stops when the device
//! is removed. If the listener also accepts TCP, the TCP half continues, and the RDMA half resumes
//! when the device is back.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_verbs::{CmId, EventChannel};

use super::Poller;
use super::connect::{Handshake, device_of};
use crate::error::{Error, ErrorKind};
use crate::fabric::Shared;
use crate::fabric::listener::{BACKLOG, Half, ListenerShared};
use crate::fabric::timers::Timer;
use crate::mem::lock;

/// The first and the longest delay before another attempt to listen.
const FIRST_DELAY: Duration = Duration::from_secs(1);
const LAST_DELAY: Duration = Duration::from_secs(8);

/// Where to listen: the address, and whether `[::]` means only IPv6.
type At = (SocketAddr, bool);

/// A listener whose device is gone.
struct Lost {
    listener: Arc<ListenerShared>,
    at: At,
    /// The delay before the next attempt.
    wait: Duration,
}

#[derive(Default)]
pub(crate) struct LostListeners {
    by_number: HashMap<u64, Lost>,
    next: u64,
}

impl Poller {
    /// Starts to listen for RDMA.
    pub(crate) fn listen_cm(
        &mut self,
        shared: &Shared,
        at: At,
        listener: &Arc<ListenerShared>,
    ) -> Result<SocketAddr, Error> {
        if shared.devices.is_empty() {
            return Err(shared.no_rdma()); // otherwise every RDMA peer would be refused
        }
        let channel = self.cm(shared)?;
        let (local, one_family) = at;
        if local.ip().is_loopback()
            && !shared.devices.iter().any(|device| device.has_address(local.ip()))
        {
            return Err(Error::loopback(local));
        }
        let id = bind(&channel, at)?;
        // If the fabric does not use this device, fail now. Otherwise each peer would be refused
        // later.
        if let Some((device, _)) = id.device()
            && let Err(error) = device_of(shared, &id)
        {
            if error.kind() != ErrorKind::Misuse {
                return Err(error); // says why the device, port or address cannot be used
            }
            let used: Vec<_> = shared.devices.iter().map(|device| device.name.as_str()).collect();
            return Err(Error::other_device(local.ip(), &device, &used));
        }
        let local = id.local_addr().unwrap_or(local);
        self.listen_by(id, (local, one_family), listener)?;
        Ok(local)
    }

    fn listen_by(&mut self, id: CmId, at: At, listener: &Arc<ListenerShared>) -> Result<(), Error> {
        id.listen(BACKLOG as u32).map_err(|error| match error.kind() {
            // The bind for RDMA succeeded, but our own TCP listener uses the port.
            ferrite_verbs::ErrorKind::AddressInUse if listener.can_migrate => {
                Error::tcp_owns_port(at.0)
            }
            _ => error.into(),
        })?;
        let key = id.key();
        *lock(&listener.rdma) = Some(Half::Listening(key));
        self.handshakes
            .listen(key, Handshake::Listening { id, at, listener: Arc::clone(listener) });
        Ok(())
    }

    /// Stops listening for RDMA.
    pub(crate) fn stop_listening_cm(&mut self, listener: &ListenerShared) -> Option<Handshake> {
        match lock(&listener.rdma).take()? {
            Half::Listening(key) => self.handshake(key),
            Half::Lost(number) => {
                self.lost_listeners.by_number.remove(&number);
                None
            }
        }
    }

    /// Handles the loss of the device whose address a listener uses.
    pub(crate) fn lose_listener(
        &mut self,
        shared: &Shared,
        id: CmId,
        at: At,
        listener: Arc<ListenerShared>,
    ) {
        shared.commands.discard(None, id);
        if !listener.can_migrate {
            listener.fail(Error::new(ErrorKind::DeviceGone, "the listener's device was removed"));
            return;
        }
        tracing::warn!(
            "{}: the RDMA device was removed or reset; accepting only TCP until it is back",
            at.0
        );
        let number = self.lost_listeners.next;
        self.lost_listeners.next += 1;
        *lock(&listener.rdma) = Some(Half::Lost(number));
        self.wait_to_listen(number, Lost { listener, at, wait: FIRST_DELAY });
    }

    fn wait_to_listen(&mut self, number: u64, lost: Lost) {
        self.timers.add(Instant::now() + lost.wait, Timer::Listen(number));
        self.lost_listeners.by_number.insert(number, lost);
    }

    /// Tries to listen again on the address of a device that was lost.
    pub(crate) fn listen_again(&mut self, shared: &Shared, number: u64) {
        let Some(at) = self.lost_listeners.by_number.get(&number).map(|lost| lost.at) else {
            return;
        };
        let channel = self.cm(shared);
        let work = move |(): &mut ()| channel.and_then(|channel| bind(&channel, at));
        self.command(shared, None, (), work, move |poller, shared, (), bound| {
            let Some(mut lost) = poller.lost_listeners.by_number.remove(&number) else {
                shared.commands.discard(None, bound); // the listener was dropped
                return;
            };
            // Listen here and not in the command. Otherwise a request or the next removal could
            // arrive before the identifier is registered, and no listener would be found for that
            // event. Listening fails if the device has disappeared again.
            let listens = bound.and_then(|id| {
                let device = device_of(shared, &id)?;
                if device.is_gone() {
                    shared.commands.discard(None, id);
                    return Err(device.absence());
                }
                poller.listen_by(id, at, &lost.listener)
            });
            if listens.is_ok() {
                tracing::info!("{}: the RDMA device is back; accepting RDMA again", at.0);
            } else {
                lost.wait = (lost.wait * 2).min(LAST_DELAY);
                poller.wait_to_listen(number, lost);
            }
        });
    }
}

/// Creates an identifier and binds it to an address.
fn bind(channel: &EventChannel, (local, one_family): At) -> Result<CmId, Error> {
    let id = channel.create_id()?;
    if one_family {
        id.set_one_family()?;
    }
    id.bind(local)?;
    Ok(id)
}
