//! Opens the fabric and listens on the module's addresses.

use ferrite_fabric::wire::Program;
use ferrite_fabric::{Builder, Fabric, ListenOptions, Listener, Rdma};
use ferrite_session::{fabric_config, open_fabric};

use crate::api::fork;
use crate::listen::Address;
use crate::options::Options;

const NO_RDMA_ON_LOOPBACK: &str = "the module accepts no RDMA on loopback addresses; to do: bind \
    the engine, or the module (rdma-bind), to an address of an RDMA device";

/// The listeners. Each flag says whether the listener accepts RDMA.
pub(super) type Listeners = Vec<(Listener, bool)>;

/// Opens the fabric and listens on the addresses. Also returns the reasons why some of the engine's
/// addresses cannot be served. Addresses that may be absent give no reason, nor do loopback
/// addresses if RDMA is required.
pub(super) fn listen(
    options: &Options,
    addresses: &[Address],
) -> Result<(Fabric, Listeners, Vec<String>), String> {
    let requires = options.rdma() == Rdma::Require;
    let is_loopback = addresses.iter().all(|address| address.at.ip().is_loopback());
    if requires && is_loopback {
        return Err(format!("rdma is set to require, but {NO_RDMA_ON_LOOPBACK}"));
    }
    let mut config = fabric_config(options.values());
    config.program = Program::MODULE;
    if is_loopback {
        config.rdma = Rdma::Forbid; // no device needs to be opened
    }
    // If no devices are named, only those that have one of these addresses are opened.
    let served: Vec<_> =
        addresses.iter().map(|address| address.at).filter(|at| !at.ip().is_loopback()).collect();
    // The engine's main thread drives the fabric and must not wait for the kernel.
    let begin = || {
        let builder = served.iter().copied().fold(Fabric::system(), Builder::serving);
        builder.command_threads().caller_reports_absence()
    };
    let fabric =
        open_fabric(options.values(), &config, begin).map_err(|error| with_remedy(&error))?;
    let (mut listeners, mut unserved, mut why_not) = (Vec::new(), Vec::new(), None);
    for address in addresses {
        let (at, rdma) = (address.at, address.rdma(options.rdma()));
        if requires && rdma == Rdma::Forbid {
            let why = format!(
                "{at} is not served: rdma is set to require, and the module accepts no RDMA on \
                 loopback addresses"
            );
            tracing::info!("{why}");
            why_not.get_or_insert(why);
            continue;
        }
        let how = ListenOptions::new().rdma(rdma).accept_foreign_peers().one_family();
        match fabric.listen_with(at, &how) {
            Ok(listener) => {
                // `rdma-device` names devices, but the address belongs to another device.
                let other = listener.absence().filter(|error| error.is_other_device());
                if let Some(error) = other.filter(|_| address.is_named && options.names_devices()) {
                    return Err(format!("cannot listen on {at}: {}", with_remedy(error)));
                }
                let has_rdma =
                    rdma != Rdma::Forbid && fabric.absence().or(listener.absence()).is_none();
                listeners.push((listener, has_rdma));
            }
            Err(_) if address.may_be_absent => {}
            Err(error) => {
                let over = if requires { " over RDMA" } else { "" };
                let why = format!("cannot listen on {at}{over}: {}", with_remedy(&error));
                // If one of the engine's own addresses fails, the others are still served.
                if address.is_named {
                    return Err(why);
                }
                unserved.push(why);
            }
        }
    }
    fork::close_in_children(listeners.iter().flat_map(|(listener, _)| listener.descriptors()));
    if listeners.is_empty() {
        let first = unserved.into_iter().next().or(why_not);
        return Err(first.unwrap_or_else(|| {
            "the module can listen on none of the engine's bind addresses: this host lacks them, \
             or their port is in use; load the module with rdma-bind ADDRESS"
                .into()
        }));
    }
    let is_other = |(listener, _): &(Listener, bool)| {
        listener.absence().is_some_and(ferrite_fabric::Error::is_other_device)
    };
    if options.names_devices()
        && !listeners.iter().any(|(_, has_rdma)| *has_rdma)
        && let Some((listener, _)) = listeners.iter().find(|listener| is_other(listener))
        && let Some(error) = listener.absence()
    {
        let at = listener.local_addr();
        return Err(format!("cannot listen on {at} over RDMA: {}", with_remedy(error)));
    }
    unserved
        .iter()
        .for_each(|why| tracing::warn!("{why}; the engine's other addresses are served"));
    // If no address has RDMA, the module reports the reason once for all addresses.
    if listeners.iter().any(|(_, has_rdma)| *has_rdma) {
        for listener in listeners.iter().map(|(listener, _)| listener) {
            if let Some(error) = listener.absence() {
                let at = listener.local_addr();
                tracing::warn!("{at} takes TCP only, not RDMA: {}", with_remedy(error));
            }
        }
    }
    Ok((fabric, listeners, unserved))
}

/// Returns why no listener accepts RDMA; `None` if one does.
pub(super) fn absence(fabric: &Fabric, listeners: &Listeners) -> Option<String> {
    if listeners.iter().any(|(_, has_rdma)| *has_rdma) {
        return None;
    }
    if listeners.iter().all(|(listener, _)| listener.local_addr().ip().is_loopback()) {
        return Some(NO_RDMA_ON_LOOPBACK.into());
    }
    let why =
        fabric.absence().or_else(|| listeners.iter().find_map(|(listener, _)| listener.absence()));
    why.map(with_remedy)
}

/// Returns the text of an error together with its remedy.
pub(super) fn with_remedy(error: &ferrite_fabric::Error) -> String {
    match error.remedy() {
        Some(remedy) => format!("{error}; to do: {remedy}"),
        None => error.to_string(),
    }
}
