//! Tests of C calls in the wrong order, which the safe types cannot make.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::time::Duration;

use super::table::{CM, IBV};
use super::{DeviceSpec, Objects, World};
use crate::error::last_errno;
use crate::sys;

const EAGAIN: c_int = 11;
const EBUSY: c_int = 16;
const EINVAL: c_int = 22;

/// Creates a world with one device, and opens the device.
fn open() -> (World, *mut sys::ibv_context) {
    let world = World::new();
    world.add_device(DeviceSpec::new("fake1", "10.0.0.1".parse().expect("an address")));
    let mut len = 0;
    // SAFETY: the list is used before it is freed, and `len` is valid for the write.
    let context = unsafe {
        let list = world.enter(|| (IBV.ibv_get_device_list)(&raw mut len));
        assert_eq!(len, 1);
        let context = (IBV.ibv_open_device)(*list);
        (IBV.ibv_free_device_list)(list);
        context
    };
    (world, context)
}

#[test]
fn parents_are_busy_while_they_have_children() {
    let (world, context) = open();
    let mut memory = [0_u8; 64];
    // SAFETY: objects are used between their creation and their destruction, in this thread; the
    // memory outlives its region.
    unsafe {
        let pd = (IBV.ibv_alloc_pd)(context);
        let mr = (IBV.ibv_reg_mr)(pd, memory.as_mut_ptr().cast(), memory.len(), 1);
        assert_eq!((IBV.ibv_dealloc_pd)(pd), EBUSY);
        assert_eq!((IBV.ibv_dereg_mr)(mr), 0);
        let channel = (IBV.ibv_create_comp_channel)(context);
        let cq = (IBV.ibv_create_cq)(context, 4, null_mut(), channel, 0);
        assert_eq!((IBV.ibv_destroy_comp_channel)(channel), EBUSY);
        let mut init = sys::ibv_srq_init_attr::default();
        (init.attr.max_wr, init.attr.max_sge) = (4, 1);
        let srq = (IBV.ibv_create_srq)(pd, &raw mut init);
        let mut init =
            sys::ibv_qp_init_attr { send_cq: cq, recv_cq: cq, srq, ..Default::default() };
        (init.qp_type, init.cap.max_send_wr) = (sys::ibv_qp_type::IBV_QPT_RC, 4);
        let qp = (IBV.ibv_create_qp)(pd, &raw mut init);
        assert_eq!((IBV.ibv_destroy_cq)(cq), EBUSY);
        assert_eq!((IBV.ibv_destroy_srq)(srq), EBUSY);
        assert_eq!((IBV.ibv_close_device)(context), EBUSY);
        let live = world.objects();
        assert_eq!(
            (live.queue_pairs, live.shared_receive_queues, live.protection_domains),
            (1, 1, 1)
        );
        assert_eq!((IBV.ibv_destroy_qp)(qp), 0);
        assert_eq!((IBV.ibv_destroy_srq)(srq), 0);
        assert_eq!((IBV.ibv_destroy_cq)(cq), 0);
        assert_eq!((IBV.ibv_destroy_comp_channel)(channel), 0);
        assert_eq!((IBV.ibv_dealloc_pd)(pd), 0);
        assert_eq!((IBV.ibv_close_device)(context), 0);
    }
    assert_eq!(world.objects(), Objects::default());
}

/// Creates a queue pair on an armed completion queue with a channel, and posts a receive that is
/// flushed at once.
unsafe fn flush_a_receive(
    context: *mut sys::ibv_context,
) -> (*mut sys::ibv_pd, *mut sys::ibv_comp_channel, *mut sys::ibv_cq, *mut sys::ibv_qp) {
    // SAFETY: as above.
    unsafe {
        let pd = (IBV.ibv_alloc_pd)(context);
        let channel = (IBV.ibv_create_comp_channel)(context);
        let cq = (IBV.ibv_create_cq)(context, 4, null_mut(), channel, 0);
        let mut init = sys::ibv_qp_init_attr { send_cq: cq, recv_cq: cq, ..Default::default() };
        (init.qp_type, init.cap.max_recv_wr) = (sys::ibv_qp_type::IBV_QPT_RC, 4);
        let qp = (IBV.ibv_create_qp)(pd, &raw mut init);
        let ops = (*context).ops;
        let (mut wr, mut bad) = (sys::ibv_recv_wr::default(), null_mut());
        let post = ops.post_recv.expect("an operation");
        assert_eq!(post(qp, &raw mut wr, &raw mut bad), EINVAL, "nothing can be posted in RESET");
        assert_eq!(bad, &raw mut wr);
        let mut attr =
            sys::ibv_qp_attr { qp_state: sys::ibv_qp_state::IBV_QPS_RTR, ..Default::default() };
        assert_eq!((IBV.ibv_modify_qp)(qp, &raw mut attr, 1), EINVAL, "RESET cannot change to RTR");
        attr.qp_state = sys::ibv_qp_state::IBV_QPS_INIT;
        assert_eq!((IBV.ibv_modify_qp)(qp, &raw mut attr, 1), EINVAL, "INIT needs a port");
        attr.qp_state = sys::ibv_qp_state::IBV_QPS_ERR;
        assert_eq!((IBV.ibv_modify_qp)(qp, &raw mut attr, 1), 0);
        assert_eq!((ops.req_notify_cq.expect("an operation"))(cq, 0), 0);
        assert_eq!(post(qp, &raw mut wr, &raw mut bad), 0, "ERROR accepts and flushes");
        (pd, channel, cq, qp)
    }
}

#[test]
fn destroy_waits_until_events_are_acknowledged() {
    let (world, context) = open();
    // SAFETY: as above. The other thread acknowledges the queue's event while this thread waits in
    // `ibv_destroy_cq`. The C interface allows this.
    unsafe {
        let (pd, channel, cq, qp) = flush_a_receive(context);
        let (mut got, mut key) = (null_mut(), null_mut());
        assert_eq!((IBV.ibv_get_cq_event)(channel, &raw mut got, &raw mut key), 0);
        assert_eq!((got, world.objects().unacked_events), (cq, 1));
        assert_eq!((IBV.ibv_destroy_qp)(qp), 0);
        let addr = cq.expose_provenance();
        let start = std::time::Instant::now();
        let acknowledger = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            (IBV.ibv_ack_cq_events)(std::ptr::with_exposed_provenance_mut(addr), 1);
        });
        assert_eq!((IBV.ibv_destroy_cq)(cq), 0);
        assert!(start.elapsed() >= Duration::from_millis(50), "ibv_destroy_cq must wait");
        acknowledger.join().expect("the acknowledging thread");

        let fd = std::os::fd::BorrowedFd::borrow_raw((*channel).fd);
        crate::context::set_nonblocking(fd, "channel").expect("fcntl");
        assert_eq!((IBV.ibv_get_cq_event)(channel, &raw mut got, &raw mut key), -1);
        assert_eq!(last_errno().raw_os_error(), EAGAIN);
        assert_eq!((IBV.ibv_destroy_comp_channel)(channel), 0);
        assert_eq!((IBV.ibv_dealloc_pd)(pd), 0);
        assert_eq!((IBV.ibv_close_device)(context), 0);
    }
    assert_eq!(world.objects(), Objects::default());
}

#[test]
fn destroying_an_object_drops_its_events() {
    let (world, context) = open();
    // SAFETY: as above.
    unsafe {
        let (pd, channel, cq, qp) = flush_a_receive(context);
        assert!(world.break_queue_pair((*qp).qp_num));
        assert_eq!((IBV.ibv_destroy_qp)(qp), 0);
        assert_eq!((IBV.ibv_destroy_cq)(cq), 0);
        for fd in [(*channel).fd, (*context).async_fd] {
            let fd = std::os::fd::BorrowedFd::borrow_raw(fd);
            assert!(!crate::context::wait_readable(fd, Duration::ZERO).expect("poll"));
        }
        assert_eq!((IBV.ibv_destroy_comp_channel)(channel), 0);
        assert_eq!((IBV.ibv_dealloc_pd)(pd), 0);
        assert_eq!((IBV.ibv_close_device)(context), 0);
    }
    assert_eq!(world.objects(), Objects::default());
}

#[test]
fn calls_without_an_object_need_a_world() {
    // SAFETY: no preconditions.
    unsafe {
        assert!((IBV.ibv_get_device_list)(null_mut()).is_null());
        assert!((CM.rdma_create_event_channel)().is_null());
    }
}

#[test]
#[should_panic(expected = "unknown C function: ibv_destory_qp")]
fn panics_on_an_unknown_function_name() {
    World::new().fail_next("ibv_destory_qp", EBUSY);
}
