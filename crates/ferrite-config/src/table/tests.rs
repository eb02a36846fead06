//! Tests of the rules that all settings in the table follow.

use std::collections::HashSet;

use super::*;
use crate::find;

#[test]
fn every_default_parses() {
    for setting in all() {
        for program in setting.programs {
            let default = setting.default_in(*program);
            if !default.is_empty() {
                setting.parse(default).unwrap_or_else(|why| panic!("{}: {why}", setting.name));
            }
        }
    }
}

#[test]
fn bounds_of_each_range_parse() {
    for setting in all() {
        let range = setting.kind.range();
        for bound in range.split(" to ").filter(|bound| !bound.is_empty()) {
            setting.parse(bound).unwrap_or_else(|why| panic!("{} {bound}: {why}", setting.name));
        }
    }
}

#[test]
fn port_in_the_table_is_the_shared_constant() {
    assert_eq!(RDMA_PORT.default, CLIENT_PORT.to_string());
}

#[test]
fn names_keys_and_aliases_are_unique_within_a_program() {
    for program in Program::ALL {
        let mut seen = HashSet::new();
        for setting in program.settings() {
            assert!(seen.insert(setting.name), "{}: {}", program.name(), setting.name);
            assert!(setting.key.is_empty() || seen.insert(setting.key), "{}", setting.key);
            for alias in setting.aliases {
                assert!(seen.insert(alias.name), "{}", alias.name);
            }
        }
    }
}

#[test]
fn each_name_finds_its_setting() {
    for program in Program::ALL {
        for setting in program.settings() {
            let (found, _) = find(program, setting.name).expect("a setting");
            assert!(std::ptr::eq(found, setting), "{}", setting.name);
            for alias in setting.aliases {
                let (found, by) = find(program, alias.name).expect("a setting");
                assert!(std::ptr::eq(found, setting) && by.is_some(), "{}", alias.name);
            }
        }
    }
    // In other software, `rdma_port` is the port of the device. Our port for clients has a hyphen.
    let (found, _) = find(Program::Module, "rdma_port").expect("a setting");
    assert!(std::ptr::eq(found, &RDMA_DEVICE_PORT));
    assert!(find(Program::Module, "rdma-prot").is_none());
}

#[test]
fn names_are_spelt_alike() {
    let lower = |text: &str, and: char| {
        text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == and)
    };
    for setting in all() {
        assert!(lower(setting.name, '-'), "{}", setting.name);
        assert!(setting.key.split('.').all(|part| lower(part, '_')), "{}", setting.key);
        assert!(setting.meaning.ends_with(['.', ')']), "{}", setting.name);
    }
}

#[test]
fn other_softwares_units_and_words_are_converted() {
    let parse = |name: &str, text: &str| {
        let (setting, alias) = find(Program::Gateway, name).expect(name);
        alias.expect(name).parse(setting, text).map(|value| value.to_string())
    };
    assert_eq!(parse("rdma_memory_pool_initial_size_mb", "1024"), Ok("1gb".into()));
    assert_eq!(parse("rdma_recv_block_type", "large"), Ok("64kb".into()));
    assert_eq!(parse("rdma_sq_size", "128"), Ok("128".into()));
    assert_eq!(parse("rdma_recv_block_type", "x"), Err("expected default or large or huge".into()));
    assert!(parse("rdma_memory_pool_initial_size_mb", "1gb").is_err());
}

#[test]
fn refused_keys_name_a_replacement_and_are_no_settings() {
    for (key, instead) in REFUSED {
        assert!(all().all(|setting| setting.key != key), "{key}");
        assert_eq!(refused(key), Some(instead));
    }
    assert!(refused("max-send-sge").is_some() && refused("rdma_max_sge").is_some());
    assert_eq!(refused("max_connections"), None);
}
