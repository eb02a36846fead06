//! Tests of the origins of values, of contradictions between settings, and of the RDMA policy.

use super::*;
use crate::table::{
    BUSY_POLL_US, RDMA, RDMA_DEVICE, RDMA_ENABLED, RDMA_FALLBACK, SEND_QUEUE_DEPTH,
};

fn given(texts: &[(&'static Setting, &str)]) -> Values {
    let mut values = Values::new(Program::Gateway);
    for (setting, text) in texts {
        values.set_text(setting, None, text, Origin::Flag).expect(text);
    }
    values
}

#[test]
fn later_origins_take_precedence() {
    let mut values = Values::new(Program::Gateway);
    let count = |values: &Values| values.number::<u32>(&SEND_QUEUE_DEPTH);
    assert_eq!((count(&values), values.is_given(&SEND_QUEUE_DEPTH)), (128, false));
    let mut set = |text: &str, origin: Origin| {
        values.set_text(&SEND_QUEUE_DEPTH, None, text, origin).expect(text);
        (count(&values), values.entry(&SEND_QUEUE_DEPTH).origin.name())
    };
    assert_eq!(set("64", Origin::File { line: 3 }), (64, "file"));
    assert_eq!(set("256", Origin::Flag), (256, "flag"));
    assert_eq!(set("32", Origin::Environment), (256, "flag"));
    assert_eq!(set("16", Origin::File { line: 9 }), (256, "flag"));
}

#[test]
fn one_origin_may_not_contradict_itself() {
    let mut values = Values::new(Program::Gateway);
    let file = |line| Origin::File { line };
    values.set_text(&SEND_QUEUE_DEPTH, None, "64", file(3)).expect("the first value");
    values.set_text(&SEND_QUEUE_DEPTH, None, "64", file(4)).expect("the same value again");
    assert_eq!(
        values.set_text(&SEND_QUEUE_DEPTH, None, "128", file(5)),
        Err("contradicts 64 in line 4; remove one".to_owned())
    );
}

#[test]
fn environment_is_read_by_name() {
    let mut values = Values::new(Program::Relay);
    let environment = |name: &str| (name == "FERRITE_BUSY_POLL_US").then(|| "50".to_owned());
    values.set_from_environment(environment).expect("a valid value");
    assert_eq!(values.time(&BUSY_POLL_US), Duration::from_micros(50));
    assert_eq!(values.entry(&BUSY_POLL_US).origin, Origin::Environment);
    let wrong = |name: &str| (name == "FERRITE_CQ_SIZE").then(|| "x".to_owned());
    let error = values.set_from_environment(wrong).expect_err("the value is not a number");
    assert!(error.starts_with("environment variable FERRITE_CQ_SIZE=\"x\": expected"), "{error}");
}

#[test]
fn three_settings_spell_one_policy() {
    for (texts, policy) in [
        (&[][..], Policy::Prefer),
        (&[(&RDMA, "require")], Policy::Require),
        (&[(&RDMA_FALLBACK, "none")], Policy::Require),
        (&[(&RDMA_FALLBACK, "tcp"), (&RDMA_ENABLED, "yes")], Policy::Prefer),
        (&[(&RDMA_ENABLED, "no"), (&RDMA_FALLBACK, "tcp")], Policy::Forbid),
        (&[(&RDMA_ENABLED, "yes"), (&RDMA, "require")], Policy::Require),
    ] {
        assert_eq!(given(texts).policy(), Ok(policy), "{texts:?}");
    }
    for texts in [
        [(&RDMA, "require"), (&RDMA_FALLBACK, "tcp")],
        [(&RDMA, "forbid"), (&RDMA_ENABLED, "yes")],
        [(&RDMA, "require"), (&RDMA_ENABLED, "no")],
        [(&RDMA_FALLBACK, "none"), (&RDMA_ENABLED, "no")],
    ] {
        let error = given(&texts).policy().expect_err("a contradiction");
        assert!(error.contains("contradict each other"), "{error}");
    }
}

#[test]
fn a_flag_overrides_the_policy_of_the_file() {
    let mut values = Values::new(Program::Gateway);
    let line = || Origin::File { line: 1 };
    values.set_text(&RDMA_FALLBACK, None, "tcp", line()).expect("a value");
    values.set_text(&RDMA_ENABLED, None, "yes", line()).expect("a value");
    values.set_text(&RDMA, None, "forbid", Origin::Flag).expect("a value");
    assert_eq!(values.policy(), Ok(Policy::Forbid));
}

#[test]
fn memory_settings_must_fit_each_other() {
    let wrong = |texts: &[(&'static Setting, &str)]| {
        let wrong = given(texts).check().expect_err("a contradiction");
        wrong.into_iter().map(|(setting, _)| setting.name).collect::<Vec<_>>()
    };
    assert_eq!(wrong(&[(&table::MEMORY_POOL_INITIAL, "2gb")]), ["memory-pool-initial"]);
    assert_eq!(wrong(&[(&table::RECEIVE_RESERVE, "1gb")]), ["receive-reserve"]);
    assert_eq!(wrong(&[(&table::RECV_BUFFER_POOL_SIZE, "10000")]), ["recv-buffer-pool-size"]);
    let fits = [(&table::RECV_BUFFER_POOL_SIZE, "10000"), (&table::RECV_BUFFER_SIZE, "4096")];
    assert!(given(&fits).check().is_ok());
    for program in Program::ALL {
        assert!(Values::new(program).check().is_ok(), "{}", program.name());
    }
}

#[test]
fn values_are_read_with_their_types() {
    let values = given(&[(&RDMA_DEVICE, "rxe1,rxe2"), (&BUSY_POLL_US, "1ms")]);
    assert_eq!(values.list(&RDMA_DEVICE), ["rxe1", "rxe2"]);
    assert_eq!(values.time(&BUSY_POLL_US), Duration::from_millis(1));
    assert_eq!(values.text(&RDMA), Some("prefer"));
    assert_eq!(values.text(&table::DATA_DIR), None);
}
