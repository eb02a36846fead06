//! The C functions of librdmacm, which call the state machine in [`handshake`](super::handshake).

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::task::Poll;

use rustix::io::Errno;

use super::World;
use super::enter::{enter, enter_until};
use super::object::{self, ACK_WAIT, Events, Id, Object, minus_one, pointer};
use super::records::{CmChannel, INIT, Identifier, Params, Phase, REMOTE_WRITE, RTR, RTS, gid_of};
use super::state::State;
use crate::cm_abi::{RawAddress, from_raw};
use crate::sys;
use crate::sys::ibv_qp_attr_mask as Mask;

/// The maximum backlog, and the default if the caller gives none.
const BACKLOG_MAX: usize = 1024;
/// The ack timeout on RoCE if the caller sets none: 2 s, as in older kernels. Newer kernels use 17
/// (0.5 s).
const ACK_TIMEOUT: u8 = 19;

/// A fetched event. It is freed when it is acknowledged.
#[repr(C)]
struct FetchedEvent {
    raw: sys::rdma_cm_event,
    data: Vec<u8>,
    /// The identifier whose destruction waits for the acknowledgement.
    counted_on: Id,
    world: World,
}

impl State {
    pub(super) fn add_identifier(
        &mut self,
        channel: Id,
        context: *mut c_void,
    ) -> Result<Id, Errno> {
        let raw_channel = self.cm_channels.get(&channel).ok_or(Errno::INVAL)?.raw;
        let id = self.new_id();
        let raw = sys::rdma_cm_id {
            channel: raw_channel.0,
            context,
            ps: sys::rdma_port_space::RDMA_PS_TCP,
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            ..Default::default()
        };
        let raw = Object::for_caller(raw, id, self.world()?);
        let identifier = Identifier {
            channel,
            phase: Phase::Idle,
            local: None,
            remote: None,
            device: None,
            peer: None,
            owns_port: false,
            is_passive: false,
            reuse: false,
            tos: 0,
            ack_timeout: None,
            backlog: 0,
            sent: Params::default(),
            received: Params::default(),
            unacked: 0,
            raw,
        };
        self.identifiers.insert(id, identifier);
        Ok(id)
    }

    /// Writes the addresses and the device to the C struct, where callers read them.
    pub(super) fn publish_addresses(&mut self, id: Id) {
        let Some(found) = self.identifiers.get(&id) else { return };
        let device = found.device.and_then(|device| self.devices.get(&device));
        // SAFETY: the identifier is alive while it is in the map. The owner of the identifier reads
        // these fields, but not now: it is inside a call on the identifier, or does not know the
        // identifier yet.
        unsafe {
            let raw = found.raw.0;
            if let Some(local) = found.local {
                (*raw).route.addr.__bindgen_anon_1.src_storage = storage(local);
            }
            if let Some(remote) = found.remote {
                (*raw).route.addr.__bindgen_anon_2.dst_storage = storage(remote);
            }
            if let Some(device) = device {
                (*raw).verbs = device.cm_context.context();
                (*raw).port_num = device.spec.port;
            }
        }
    }

    /// Notifies the peer of an identifier, then removes the identifier, its unfetched events and,
    /// for a listener, the identifiers of unfetched requests.
    fn remove_identifier(&mut self, id: Id) {
        self.notify_peer_of_destroy(id);
        let Some(gone) = self.identifiers.remove(&id) else { return };
        let unfetched = match self.cm_channels.get_mut(&gone.channel) {
            Some(channel) => {
                channel.events.remove(|event| event.id == id || event.listener == Some(id))
            }
            None => Vec::new(),
        };
        for event in unfetched.into_iter().filter(|event| event.listener == Some(id)) {
            self.remove_identifier(event.id);
        }
        // SAFETY: the identifier is in no map any more. Its owner is destroying it, or never got
        // it.
        unsafe { object::free(gone.raw) };
    }

    fn attributes(&self, id: Id, attr: &mut sys::ibv_qp_attr) -> Result<u32, Errno> {
        let found = self.identifiers.get(&id).ok_or(Errno::INVAL)?;
        let device = self.devices.get(&found.device.ok_or(Errno::INVAL)?).ok_or(Errno::INVAL)?;
        let (Some(local), phase) = (found.local, found.phase) else { return Err(Errno::INVAL) };
        let agreed = !matches!(
            phase,
            Phase::Idle
                | Phase::Bound
                | Phase::AddressResolved
                | Phase::RouteResolved
                | Phase::Listening
                | Phase::Connecting
                | Phase::Closed
        );
        match attr.qp_state {
            INIT if !matches!(phase, Phase::Idle | Phase::Bound | Phase::Listening) => {
                attr.port_num = device.spec.port;
                attr.pkey_index = 0;
                attr.qp_access_flags = REMOTE_WRITE;
                Ok(Mask::IBV_QP_PKEY_INDEX.0 | Mask::IBV_QP_PORT.0 | Mask::IBV_QP_ACCESS_FLAGS.0)
            }
            RTR if agreed => {
                let remote = found.remote.ok_or(Errno::INVAL)?;
                let asked_by = if found.is_passive { found.peer } else { Some(id) };
                let asked_by = asked_by.and_then(|id| self.identifiers.get(&id)?.device);
                let asked_by = asked_by.and_then(|id| self.devices.get(&id)).unwrap_or(device);
                attr.path_mtu = sys::ibv_mtu(asked_by.spec.active_mtu);
                attr.dest_qp_num = found.received.qp_num;
                attr.rq_psn = found.received.qp_num;
                attr.max_dest_rd_atomic = found.received.initiator_depth;
                attr.min_rnr_timer = 0;
                attr.ah_attr = sys::ibv_ah_attr {
                    is_global: 1,
                    port_num: device.spec.port,
                    ..Default::default()
                };
                attr.ah_attr.grh.dgid.raw = gid_of(remote.ip());
                attr.ah_attr.grh.sgid_index =
                    device.gid_index(gid_of(local.ip())).ok_or(Errno::INVAL)?;
                attr.ah_attr.grh.hop_limit = 64;
                attr.ah_attr.grh.traffic_class = found.tos;
                Ok(Mask::IBV_QP_AV.0
                    | Mask::IBV_QP_PATH_MTU.0
                    | Mask::IBV_QP_DEST_QPN.0
                    | Mask::IBV_QP_RQ_PSN.0
                    | Mask::IBV_QP_MAX_DEST_RD_ATOMIC.0
                    | Mask::IBV_QP_MIN_RNR_TIMER.0)
            }
            RTS if agreed => {
                // The side that requested the connection decides the retry count.
                let asked = if found.is_passive {
                    found.received.retry_count
                } else {
                    found.sent.retry_count
                };
                attr.sq_psn = found.sent.qp_num;
                attr.timeout = found.ack_timeout.unwrap_or(ACK_TIMEOUT);
                attr.retry_cnt = asked;
                attr.rnr_retry = found.received.rnr_retry_count;
                attr.max_rd_atomic = found.received.responder_resources;
                Ok(Mask::IBV_QP_TIMEOUT.0
                    | Mask::IBV_QP_RETRY_CNT.0
                    | Mask::IBV_QP_RNR_RETRY.0
                    | Mask::IBV_QP_SQ_PSN.0
                    | Mask::IBV_QP_MAX_QP_RD_ATOMIC.0)
            }
            _ => Err(Errno::INVAL),
        }
    }

    fn set_option(&mut self, id: Id, option: u32, value: &[u8]) -> Result<(), Errno> {
        const TOS: u32 = sys::RDMA_OPTION_ID_TOS.0;
        const REUSE: u32 = sys::RDMA_OPTION_ID_REUSEADDR.0;
        const ACK: u32 = sys::RDMA_OPTION_ID_ACK_TIMEOUT.0;
        const ONE_FAMILY: u32 = sys::RDMA_OPTION_ID_AFONLY.0;
        let found = self.identifiers.get_mut(&id).ok_or(Errno::INVAL)?;
        match (option, value) {
            (TOS, [tos]) => found.tos = *tos,
            (REUSE, [on, _, _, _]) if found.phase == Phase::Idle => found.reuse = *on != 0,
            (ACK, [timeout]) if *timeout <= 31 => found.ack_timeout = Some(*timeout),
            (ONE_FAMILY, [_, _, _, _]) => {}
            (TOS | REUSE | ACK | ONE_FAMILY, _) => return Err(Errno::INVAL),
            _ => return Err(Errno::NOSYS),
        }
        Ok(())
    }
}

fn storage(addr: SocketAddr) -> sys::sockaddr_storage {
    // SAFETY: a `RawAddress` contains a whole `sockaddr_storage`.
    unsafe { RawAddress::from(addr).as_mut_ptr().cast::<sys::sockaddr_storage>().read() }
}

/// Reads a socket address.
///
/// # Safety
/// `addr` is null or points to a whole `sockaddr_storage`. This crate always passes one.
unsafe fn address(addr: *const sys::sockaddr) -> Option<SocketAddr> {
    // SAFETY: the caller guarantees a whole `sockaddr_storage`.
    (!addr.is_null()).then(|| from_raw(unsafe { &*addr.cast() }))?
}

/// Copies a C array.
///
/// # Safety
/// `data` is null or points to `len` bytes.
unsafe fn bytes(data: *const c_void, len: u8) -> Vec<u8> {
    if data.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller guarantees `len` bytes.
    unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len.into()) }.to_vec()
}

/// Reads connection parameters and their private data.
///
/// # Safety
/// `raw` is null or valid, and so is the private data that it names.
unsafe fn params(raw: *const sys::rdma_conn_param) -> Result<(Params, Vec<u8>), Errno> {
    // SAFETY: the caller guarantees that `raw` is null or valid.
    let raw = unsafe { raw.as_ref() }.ok_or(Errno::INVAL)?;
    let params = Params {
        qp_num: raw.qp_num,
        srq: raw.srq,
        flow_control: raw.flow_control,
        responder_resources: raw.responder_resources,
        initiator_depth: raw.initiator_depth,
        retry_count: raw.retry_count,
        rnr_retry_count: raw.rnr_retry_count,
    };
    // SAFETY: the caller guarantees that the private data is null or valid.
    Ok((params, unsafe { bytes(raw.private_data, raw.private_data_len) }))
}

pub(super) unsafe extern "C" fn create_event_channel() -> *mut sys::rdma_event_channel {
    pointer(World::current().ok_or(Errno::NODEV).and_then(|world| {
        let mut state = world.lock();
        if let Some(errno) = state.take_fault("rdma_create_event_channel") {
            return Err(errno);
        }
        let events = Events::new()?;
        let id = state.new_id();
        let raw =
            Object::for_caller(sys::rdma_event_channel { fd: events.fd() }, id, world.clone());
        state.cm_channels.insert(id, CmChannel { events, raw });
        Ok(raw.0)
    }))
}

pub(super) unsafe extern "C" fn destroy_event_channel(channel: *mut sys::rdma_event_channel) {
    // SAFETY: the caller's channel is alive until here, and not used after.
    let _ = unsafe {
        enter("", channel, |state, id| {
            object::free(state.cm_channels.remove(&id).ok_or(Errno::INVAL)?.raw);
            Ok(())
        })
    };
}

pub(super) unsafe extern "C" fn create_id(
    channel: *mut sys::rdma_event_channel,
    id: *mut *mut sys::rdma_cm_id,
    context: *mut c_void,
    ps: sys::rdma_port_space,
) -> c_int {
    // SAFETY: the caller's channel is alive, and `id` is valid for the write.
    minus_one(unsafe {
        enter("rdma_create_id", channel, |state, channel| {
            if ps != sys::rdma_port_space::RDMA_PS_TCP {
                return Err(Errno::PROTONOSUPPORT);
            }
            let name = state.add_identifier(channel, context)?;
            *id = state.identifiers[&name].raw.0;
            Ok(())
        })
    })
}

pub(super) unsafe extern "C" fn destroy_id(id: *mut sys::rdma_cm_id) -> c_int {
    // SAFETY: the caller's identifier is alive until here, and not used after.
    minus_one(unsafe {
        enter_until("rdma_destroy_id", id, Some(ACK_WAIT), |state, id| {
            match state.identifiers.get(&id) {
                None => Poll::Ready(Err(Errno::INVAL)),
                Some(found) if found.unacked > 0 => Poll::Pending,
                Some(_) => {
                    state.remove_identifier(id);
                    Poll::Ready(Ok(()))
                }
            }
        })
    })
}

pub(super) unsafe extern "C" fn bind_addr(
    id: *mut sys::rdma_cm_id,
    addr: *mut sys::sockaddr,
) -> c_int {
    // SAFETY: the caller's identifier is alive; its address is valid for the call.
    minus_one(unsafe {
        enter("rdma_bind_addr", id, |state, id| {
            state.bind(id, address(addr).ok_or(Errno::AFNOSUPPORT)?)
        })
    })
}

pub(super) unsafe extern "C" fn resolve_addr(
    id: *mut sys::rdma_cm_id,
    source: *mut sys::sockaddr,
    target: *mut sys::sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's identifier is alive; its addresses are valid for the call.
    minus_one(unsafe {
        enter("rdma_resolve_addr", id, |state, id| {
            state.resolve_address(id, address(source), address(target).ok_or(Errno::AFNOSUPPORT)?)
        })
    })
}

pub(super) unsafe extern "C" fn resolve_route(
    id: *mut sys::rdma_cm_id,
    _timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller's identifier is alive.
    minus_one(unsafe { enter("rdma_resolve_route", id, State::resolve_route) })
}

pub(super) unsafe extern "C" fn listen(id: *mut sys::rdma_cm_id, backlog: c_int) -> c_int {
    let backlog =
        usize::try_from(backlog).ok().filter(|backlog| (1..BACKLOG_MAX).contains(backlog));
    // SAFETY: the caller's identifier is alive.
    minus_one(unsafe {
        enter("rdma_listen", id, |state, id| state.listen(id, backlog.unwrap_or(BACKLOG_MAX)))
    })
}

pub(super) unsafe extern "C" fn connect(
    id: *mut sys::rdma_cm_id,
    param: *mut sys::rdma_conn_param,
) -> c_int {
    // SAFETY: the caller's identifier is alive; the parameters and their data are valid for the
    // call.
    minus_one(unsafe {
        enter("rdma_connect", id, |state, id| {
            let (params, data) = params(param)?;
            state.connect(id, params, data)
        })
    })
}

pub(super) unsafe extern "C" fn establish(id: *mut sys::rdma_cm_id) -> c_int {
    // SAFETY: the caller's identifier is alive.
    minus_one(unsafe { enter("rdma_establish", id, State::establish) })
}

pub(super) unsafe extern "C" fn accept(
    id: *mut sys::rdma_cm_id,
    param: *mut sys::rdma_conn_param,
) -> c_int {
    // SAFETY: as in `connect`.
    minus_one(unsafe {
        enter("rdma_accept", id, |state, id| {
            let (params, data) = params(param)?;
            state.accept(id, params, data)
        })
    })
}

pub(super) unsafe extern "C" fn reject(
    id: *mut sys::rdma_cm_id,
    data: *const c_void,
    len: u8,
) -> c_int {
    // SAFETY: the caller's identifier is alive; the data is valid for the call.
    minus_one(unsafe { enter("rdma_reject", id, |state, id| state.reject(id, bytes(data, len))) })
}

pub(super) unsafe extern "C" fn disconnect(id: *mut sys::rdma_cm_id) -> c_int {
    // SAFETY: the caller's identifier is alive.
    minus_one(unsafe { enter("rdma_disconnect", id, State::disconnect) })
}

pub(super) unsafe extern "C" fn get_cm_event(
    channel: *mut sys::rdma_event_channel,
    event: *mut *mut sys::rdma_cm_event,
) -> c_int {
    // SAFETY: the caller's channel is alive, and `event` is valid for the write.
    minus_one(unsafe {
        enter_until("rdma_get_cm_event", channel, None, |state, id| {
            let world = match state.world() {
                Ok(world) => world,
                Err(errno) => return Poll::Ready(Err(errno)),
            };
            let Some(channel) = state.cm_channels.get_mut(&id) else {
                return Poll::Ready(Err(Errno::INVAL));
            };
            channel.events.take().map_ok(|taken| {
                let raw_of =
                    |id: Id| state.identifiers.get(&id).map_or(std::ptr::null_mut(), |id| id.raw.0);
                let mut raw = sys::rdma_cm_event {
                    id: raw_of(taken.id),
                    listen_id: taken.listener.map_or(std::ptr::null_mut(), raw_of),
                    event: taken.kind,
                    status: taken.status,
                    ..Default::default()
                };
                raw.param.conn = sys::rdma_conn_param {
                    private_data: if taken.data.is_empty() {
                        std::ptr::null()
                    } else {
                        taken.data.as_ptr().cast()
                    },
                    private_data_len: u8::try_from(taken.data.len()).unwrap_or(u8::MAX),
                    responder_resources: taken.params.responder_resources,
                    initiator_depth: taken.params.initiator_depth,
                    flow_control: taken.params.flow_control,
                    retry_count: taken.params.retry_count,
                    rnr_retry_count: taken.params.rnr_retry_count,
                    srq: taken.params.srq,
                    qp_num: taken.params.qp_num,
                };
                let counted_on = taken.listener.unwrap_or(taken.id);
                if let Some(found) = state.identifiers.get_mut(&counted_on) {
                    found.unacked += 1;
                }
                let fetched = FetchedEvent { raw, data: taken.data, counted_on, world };
                *event = Box::into_raw(Box::new(fetched)).cast();
            })
        })
    })
}

pub(super) unsafe extern "C" fn ack_cm_event(event: *mut sys::rdma_cm_event) -> c_int {
    // SAFETY: the caller's event came from `get_cm_event`, is acknowledged once, and is not used
    // afterwards.
    let fetched = unsafe { Box::from_raw(event.cast::<FetchedEvent>()) };
    let FetchedEvent { counted_on, world, data, .. } = *fetched;
    drop(data);
    world.with(|state| {
        if let Some(found) = state.identifiers.get_mut(&counted_on) {
            found.unacked = found.unacked.saturating_sub(1);
        }
    });
    0
}

pub(super) unsafe extern "C" fn set_option(
    id: *mut sys::rdma_cm_id,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    len: usize,
) -> c_int {
    // SAFETY: the caller's identifier is alive, and the value has `len` bytes.
    minus_one(unsafe {
        enter("rdma_set_option", id, |state, id| {
            if level.cast_unsigned() != sys::RDMA_OPTION_ID.0 || value.is_null() {
                return Err(Errno::NOSYS);
            }
            let value = std::slice::from_raw_parts(value.cast::<u8>(), len);
            state.set_option(id, option.cast_unsigned(), value)
        })
    })
}

pub(super) unsafe extern "C" fn init_qp_attr(
    id: *mut sys::rdma_cm_id,
    attr: *mut sys::ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    // SAFETY: the caller's identifier is alive, and both places are valid for the write.
    minus_one(unsafe {
        enter("rdma_init_qp_attr", id, |state, id| {
            let brought = state.attributes(id, &mut *attr)?;
            *mask = (brought | Mask::IBV_QP_STATE.0).cast_signed();
            Ok(())
        })
    })
}
