//! Memory windows of type 2B: a work request binds a window to one queue pair, and all other queue
//! pairs refuse its key.
//!
//! The rules are those of the specification (10.6.7), as implemented in Soft-RoCE's `rxe_mw.c`.

use std::ffi::c_int;

use rustix::io::Errno;

use super::enter::enter;
use super::object::{self, Id, Object, code, pointer};
use super::records::{Binding, Bound, KEY_TAG, LOCAL_WRITE, REMOTE_READ, REMOTE_WRITE, Window};
use super::state::State;
use crate::sys;
use crate::sys::ibv_wc_status as Status;

const MW_BIND: u32 = sys::ibv_access_flags::IBV_ACCESS_MW_BIND.0;

impl State {
    /// Returns the window whose index is in `rkey`.
    pub(super) fn window_with_key(&self, rkey: u32) -> Option<&Window> {
        self.windows.get(&u64::from(rkey >> 8))
    }

    pub(super) fn bind_window(&mut self, qp: Id, asked: &Binding) -> Result<(), Status> {
        let refused = Err(Status::IBV_WC_MW_BIND_ERR);
        let Some(domain) = self.queue_pairs.get(&qp).map(|qp| qp.domain) else { return refused };
        let Some(region) = asked.region.and_then(|id| self.regions.get(&id)) else {
            return refused;
        };
        let writes = asked.access & REMOTE_WRITE != 0;
        let is_right = region.has_local_key(asked.lkey)
            && region.domain == domain
            && region.access & MW_BIND != 0
            && (!writes || region.access & LOCAL_WRITE != 0)
            && asked.access & !(REMOTE_READ | REMOTE_WRITE) == 0
            && asked.len > 0
            && region.part(asked.addr, asked.len).is_some();
        let Some(window) = asked.window.and_then(|id| self.windows.get_mut(&id)) else {
            return refused;
        };
        let is_free =
            window.domain == domain && window.bound.is_none() && window.rkey == asked.rkey_before;
        let is_next = asked.rkey >> 8 == window.rkey >> 8 && asked.rkey != window.rkey;
        let Some(region) = asked.region.filter(|_| is_right && is_free && is_next) else {
            return refused;
        };
        window.rkey = asked.rkey;
        let Binding { addr, len, access, .. } = *asked;
        window.bound = Some(Bound { qp, region, addr, len, access });
        Ok(())
    }

    pub(super) fn invalidate_window(&mut self, qp: Id, rkey: u32) -> Result<(), Status> {
        let found = self.windows.get_mut(&u64::from(rkey >> 8));
        match found.filter(|window| window.rkey == rkey && window.is_bound_to_queue_pair(qp)) {
            Some(window) => {
                window.bound = None;
                Ok(())
            }
            None => Err(Status::IBV_WC_LOC_QP_OP_ERR),
        }
    }
}

pub(super) unsafe extern "C" fn alloc_mw(
    pd: *mut sys::ibv_pd,
    kind: sys::ibv_mw_type,
) -> *mut sys::ibv_mw {
    // SAFETY: the caller's domain is alive.
    pointer(unsafe {
        enter("ibv_alloc_mw", pd, |state, domain| {
            let found = state.domains.get(&domain).ok_or(Errno::INVAL)?;
            let (raw_pd, context) = (found.raw, found.context);
            let raw_context = state.usable(context)?.raw.context();
            let spec = &state.device_of(context)?.spec;
            if !spec.queue_pair_windows
                || spec.windows_only_in_kernel
                || kind != sys::ibv_mw_type::IBV_MW_TYPE_2
            {
                return Err(Errno::OPNOTSUPP);
            }
            if state.windows.len() >= spec.max_mw as usize {
                return Err(Errno::NOMEM);
            }
            let id = state.new_id();
            let index =
                u32::try_from(id).ok().filter(|index| index >> 24 == 0).ok_or(Errno::NOMEM)?;
            let rkey = index << 8 | (index & KEY_TAG);
            let raw = sys::ibv_mw {
                context: raw_context,
                pd: raw_pd.0,
                rkey,
                handle: index,
                type_: kind,
            };
            let raw = Object::for_caller(raw, id, state.world()?);
            state.windows.insert(id, Window { domain, rkey, bound: None, raw });
            Ok(raw.0)
        })
    })
}

pub(super) unsafe extern "C" fn dealloc_mw(mw: *mut sys::ibv_mw) -> c_int {
    // SAFETY: the caller's window is alive until here, and not used after.
    code(unsafe {
        enter("ibv_dealloc_mw", mw, |state, id| {
            object::free(state.windows.remove(&id).ok_or(state.no_object())?.raw);
            Ok(())
        })
    })
}
