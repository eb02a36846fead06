//! Queries of a context: limits, ports, addresses and async events.

use std::ffi::c_int;
use std::net::Ipv6Addr;

use rustix::io::Errno;

use super::{GID_TABLE_LEN, ROCE_V2, Subject, put_text};
use crate::fake::enter::{enter, enter_until};
use crate::fake::execution;
use crate::fake::object::{self, code, extended};
use crate::sys;

pub(in crate::fake) unsafe extern "C" fn query_device(
    context: *mut sys::ibv_context,
    attr: *mut sys::ibv_device_attr,
) -> c_int {
    // SAFETY: the caller's context is open, and the place for the result is valid for the write.
    code(unsafe {
        enter("ibv_query_device", extended(context), |state, id| {
            let device = state.device_of(id)?;
            let count = |value: u32| value.min(i32::MAX.unsigned_abs()).cast_signed();
            let spec = &device.spec;
            let mut raw = sys::ibv_device_attr {
                node_guid: device.guid.to_be(),
                sys_image_guid: device.guid.to_be(),
                max_mr_size: spec.max_mr_bytes,
                page_size_cap: 0x1000,
                max_qp: count(spec.max_qp),
                max_qp_wr: count(spec.max_qp_wr),
                max_sge: count(spec.max_sge),
                max_sge_rd: count(spec.max_sge),
                max_cq: count(spec.max_cq),
                max_cqe: count(spec.max_cqe),
                max_mr: count(spec.max_mr),
                max_pd: count(spec.max_pd),
                max_mw: if spec.queue_pair_windows && !spec.hides_max_mw {
                    count(spec.max_mw)
                } else {
                    0
                },
                device_cap_flags: if spec.queue_pair_windows {
                    sys::DEVICE_WINDOW_TYPE_2B
                } else {
                    0
                },
                max_qp_rd_atom: count(spec.max_reads),
                max_qp_init_rd_atom: count(spec.max_reads),
                max_srq: count(spec.max_srq),
                max_srq_wr: count(spec.max_srq_wr),
                max_srq_sge: count(spec.max_srq_sge),
                max_pkeys: 1,
                phys_port_cnt: spec.port,
                ..Default::default()
            };
            put_text(&mut raw.fw_ver, "fake");
            *attr = raw;
            Ok(())
        })
    })
}

pub(super) unsafe extern "C" fn query_port_ex(
    context: *mut sys::ibv_context,
    port: u8,
    attr: *mut sys::ibv_port_attr,
    _len: usize,
) -> c_int {
    // SAFETY: as in `query_device`.
    code(unsafe {
        enter("ibv_query_port", extended(context), |state, id| {
            let device = state.device_of(id)?;
            if port == 0 || port > device.spec.port {
                return Err(Errno::INVAL);
            }
            *attr = sys::ibv_port_attr {
                state: if device.up {
                    sys::ibv_port_state::IBV_PORT_ACTIVE
                } else {
                    sys::ibv_port_state::IBV_PORT_DOWN
                },
                max_mtu: sys::ibv_mtu::IBV_MTU_4096,
                active_mtu: sys::ibv_mtu(device.spec.active_mtu),
                gid_tbl_len: GID_TABLE_LEN.into(),
                max_msg_sz: execution::MAX_MESSAGE_BYTES,
                pkey_tbl_len: 1,
                // The codes mean 4 lanes of 25 Gbit/s, and the physical state "link up" or
                // "disabled".
                active_width: 2,
                active_speed: 32,
                phys_state: if device.up { 5 } else { 3 },
                link_layer: 2,
                ..Default::default()
            };
            Ok(())
        })
    })
}

pub(in crate::fake) unsafe extern "C" fn query_port(
    context: *mut sys::ibv_context,
    port: u8,
    attr: *mut sys::_compat_ibv_port_attr,
) -> c_int {
    // SAFETY: as in `query_device`; this crate passes the full struct.
    unsafe { query_port_ex(context, port, attr.cast(), size_of::<sys::ibv_port_attr>()) }
}

pub(in crate::fake) unsafe extern "C" fn query_gid(
    context: *mut sys::ibv_context,
    port: u8,
    index: c_int,
    gid: *mut sys::ibv_gid,
) -> c_int {
    // SAFETY: as in `query_device`.
    code(unsafe {
        enter("ibv_query_gid", extended(context), |state, id| {
            let device = state.device_of(id)?;
            let index = usize::try_from(index).map_err(|_| Errno::INVAL)?;
            if port != 1 || index >= GID_TABLE_LEN.into() {
                return Err(Errno::INVAL);
            }
            (*gid).raw = device.gid(index).unwrap_or(Ipv6Addr::UNSPECIFIED.octets());
            Ok(())
        })
    })
}

pub(in crate::fake) unsafe extern "C" fn query_gid_table(
    context: *mut sys::ibv_context,
    entries: *mut sys::ibv_gid_entry,
    max_entries: usize,
    _flags: u32,
    entry_size: usize,
) -> isize {
    // SAFETY: as in `query_device`; `entries` has room for `max_entries`.
    let filled = unsafe {
        enter("ibv_query_gid_table", extended(context), |state, id| {
            let device = state.device_of(id)?;
            let used = device.spec.addresses.len() + 1;
            if entry_size != size_of::<sys::ibv_gid_entry>() || used > max_entries {
                return Err(Errno::INVAL);
            }
            for index in 0..used {
                let mut entry = sys::ibv_gid_entry {
                    gid_index: u32::try_from(index).unwrap_or(u32::MAX),
                    port_num: if index == 0 { 1 } else { device.spec.port.into() },
                    gid_type: ROCE_V2,
                    ..Default::default()
                };
                entry.gid.raw = device.gid(index).unwrap_or_default();
                entries.add(index).write(entry);
            }
            Ok(used.cast_signed())
        })
    };
    filled.unwrap_or_else(|errno| -(errno.raw_os_error() as isize))
}

pub(in crate::fake) unsafe extern "C" fn get_async_event(
    context: *mut sys::ibv_context,
    event: *mut sys::ibv_async_event,
) -> c_int {
    // SAFETY: as in `query_device`.
    object::minus_one(unsafe {
        enter_until("ibv_get_async_event", extended(context), None, |state, id| {
            let Some(context) = state.contexts.get_mut(&id) else {
                return std::task::Poll::Ready(Err(Errno::INVAL));
            };
            context.events.take().map_ok(|taken| {
                let mut raw = sys::ibv_async_event { event_type: taken.kind, ..Default::default() };
                match taken.subject {
                    Subject::QueuePair(id) => {
                        if let Some(qp) = state.queue_pairs.get_mut(&id) {
                            qp.unacked += 1;
                            raw.element.qp = qp.raw.0;
                        }
                    }
                    Subject::Queue(id) => {
                        if let Some(queue) = state.queues.get_mut(&id) {
                            queue.unacked += 1;
                            raw.element.cq = queue.raw.0;
                        }
                    }
                    Subject::SharedQueue(id) => {
                        if let Some(srq) = state.srqs.get_mut(&id) {
                            srq.unacked += 1;
                            raw.element.srq = srq.raw.0;
                        }
                    }
                    Subject::Port(number) => raw.element.port_num = number.into(),
                    Subject::Device => {}
                }
                *event = raw;
            })
        })
    })
}

pub(in crate::fake) unsafe extern "C" fn ack_async_event(event: *mut sys::ibv_async_event) {
    use sys::ibv_event_type as Kind;
    // SAFETY: `get_async_event` filled the caller's event, and the event is acknowledged once. So
    // the object that it names is not freed yet.
    unsafe {
        let element = (*event).element;
        let _ = match (*event).event_type {
            Kind::IBV_EVENT_CQ_ERR => enter("", element.cq, |state, id| {
                state
                    .queues
                    .entry(id)
                    .and_modify(|queue| queue.unacked = queue.unacked.saturating_sub(1));
                Ok(())
            }),
            Kind::IBV_EVENT_QP_FATAL
            | Kind::IBV_EVENT_QP_REQ_ERR
            | Kind::IBV_EVENT_QP_ACCESS_ERR
            | Kind::IBV_EVENT_QP_LAST_WQE_REACHED => enter("", element.qp, |state, id| {
                state
                    .queue_pairs
                    .entry(id)
                    .and_modify(|qp| qp.unacked = qp.unacked.saturating_sub(1));
                Ok(())
            }),
            Kind::IBV_EVENT_SRQ_ERR | Kind::IBV_EVENT_SRQ_LIMIT_REACHED => {
                enter("", element.srq, |state, id| {
                    state
                        .srqs
                        .entry(id)
                        .and_modify(|srq| srq.unacked = srq.unacked.saturating_sub(1));
                    Ok(())
                })
            }
            _ => Ok(()),
        };
    }
}
