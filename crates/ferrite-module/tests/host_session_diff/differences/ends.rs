//! Connections that one engine ends earlier than the other, or with fewer replies.

use super::{is_same, normalised, order_field};
use crate::compare::replies;

/// Returns whether the engine's log shows a client that was disconnected because it had unread
/// replies and no login.
///
/// Engines with the fix of CVE-2025-21605 limit such clients to 1 KiB of unread replies. A reply of
/// unknown length uses 16 KiB at once. A RESET removes the login while earlier replies, of any
/// size, are still unwritten. Unless the session sets a limit of its own, there is no other reason
/// to disconnect.
pub(crate) fn is_cut_off_without_login(log: &str, has_own_limit: bool) -> bool {
    let few = if has_own_limit { 64 << 10 } else { u64::MAX };
    let cut_off = log.lines().filter(|line| line.contains("overcoming of output buffer limits"));
    let mut waiting = cut_off
        .filter_map(|line| line.split(" omem=").nth(1)?.split(' ').next()?.parse::<u64>().ok());
    waiting.any(|bytes| bytes < few)
}

/// Returns whether the last reply rejects a large command because the client has no login. Valkey
/// 9.1 parses the headers of all commands in one read before it runs the first of them. So it still
/// accepts such a command if it arrives in the same read as the RESET before it.
pub(crate) fn ends_with_rejected_header(received: &[u8]) -> bool {
    let rejection = b"-ERR Protocol error: unauthenticated ";
    replies(received).last().is_some_and(|reply| reply.starts_with(rejection))
}

/// Returns whether this CLIENT LIST has a client that will be disconnected after its next reply. If
/// the client has sent QUIT while replies are off or skipped, there is no such reply. Engines then
/// disconnect it only if an earlier reply is still unwritten.
pub(crate) fn has_silent_quit(client_list: &[u8]) -> bool {
    let list = String::from_utf8_lossy(client_list);
    list.split_whitespace()
        .filter_map(|field| field.strip_prefix("flags="))
        .any(|flags| flags.contains('c'))
}

/// Returns whether one engine sent less only because the client had shut down its side. After
/// writing 64 KiB, an engine continues in the next iteration of its event loop, where it first
/// reads the end and disconnects the client. The engine behind the module does the same to the
/// proxy connection of a pinned session.
pub(crate) fn is_cut_off_at_the_end(one: &[u8], other: &[u8]) -> bool {
    const AT_ONCE: usize = 64 << 10; // NET_MAX_WRITES_PER_EVENT
    if one.len().min(other.len()) < AT_ONCE {
        return false;
    }
    let (short, long) = if one.len() < other.len() { (one, other) } else { (other, one) };
    if short.len() < long.len() && long.starts_with(short) {
        return true;
    }
    let [some, others] = [short, long].map(replies);
    let pairs = || some.iter().zip(&others);
    let equal = pairs().take_while(|(l, r)| is_same(&normalised(l), &normalised(r))).count();
    let mut unordered = pairs().skip(equal).peekable();
    if unordered.peek().is_none() {
        // The short side may end within a reply.
        let rest_of = |bytes, all: &[&[u8]]| {
            let known: usize = all[..equal].iter().map(|reply| reply.len()).sum();
            <[u8]>::split_at(bytes, known).1
        };
        let [rest, more] = [rest_of(short, &some), rest_of(long, &others)];
        return rest.len() < more.len() && more.starts_with(rest);
    }
    // From the first difference on, every reply must be of a kind whose order is not defined. Such
    // replies may differ only in the field that determines their order.
    unordered
        .all(|(l, r)| order_field(l).is_some() && is_same(&without_order(l), &without_order(r)))
}

/// Returns a normalised reply without the field that determines its order.
fn without_order(reply: &[u8]) -> Vec<u8> {
    let plain = normalised(reply);
    let Some((_, name)) = order_field(reply) else { return plain };
    match plain.windows(name.len()).position(|part| part == name) {
        Some(at) => [&plain[..at], &plain[at + name.len()..]].concat(),
        None => plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognises_disconnects_without_a_login() {
        let line = |omem| {
            format!(
                "# Client id=6 omem={omem} tot-mem=1 scheduled to be closed ASAP for overcoming of output buffer limits.\n"
            )
        };
        assert!(is_cut_off_without_login(&line(20_560), true));
        assert!(!is_cut_off_without_login(&line(2_000_000), true), "the configured limit");
        assert!(is_cut_off_without_login(&line(2_000_000), false), "there is no other limit");
        assert!(!is_cut_off_without_login("# Client id=6 omem=20560 closed\n", false));
    }

    #[test]
    fn long_replies_may_be_cut_off_after_a_half_close() {
        let all = vec![b'a'; 100 << 10];
        assert!(is_cut_off_at_the_end(&all[..64 << 10], &all));
        assert!(is_cut_off_at_the_end(&all, &all[..64 << 10]));
        assert!(!is_cut_off_at_the_end(&all[..1000], &all), "1,000 bytes are written at once");
        assert!(!is_cut_off_at_the_end(&all, &all[..1000]), "1,000 bytes are written at once");
        assert!(!is_cut_off_at_the_end(&vec![b'b'; 64 << 10], &all));
        let bulk = |byte| [&b"$262145\r\n"[..], &vec![byte; 64 << 10]].concat();
        assert!(!is_cut_off_at_the_end(&bulk(b's'), &bulk(b'd')), "other bytes of one long reply");
        let many = b"+PONG\r\n".repeat(20_000);
        let hello = |id| {
            let reply = format!("*4\r\n$5\r\nproto\r\n:2\r\n$2\r\nid\r\n:{id}\r\n");
            [reply.as_bytes(), &many].concat()
        };
        assert!(
            is_cut_off_at_the_end(&hello(7)[..70_000], &hello(8)),
            "the client ids before may differ"
        );
        assert!(
            !is_cut_off_at_the_end(&hello(7), &hello(8)[..60_000]),
            "less than 64 KiB are written at once"
        );
        let left = |first: u32| -> Vec<u8> {
            let reply = |at| {
                format!(
                    "*3\r\n$11\r\nunsubscribe\r\n$5\r\nc{:04}\r\n:{}\r\n",
                    (first + at) % 5000,
                    4999 - at
                )
            };
            (0..2000).flat_map(|at| reply(at).into_bytes()).collect()
        };
        assert!(is_cut_off_at_the_end(&left(0), &left(100)), "all channels, in any order");
        let one_less =
            left(1).split_off(b"*3\r\n$11\r\nunsubscribe\r\n$5\r\nc0000\r\n:4999\r\n".len());
        assert!(!is_cut_off_at_the_end(&left(0), &one_less), "the first is missing");
    }

    #[test]
    fn recognises_a_rejected_header_as_the_last_reply() {
        let rejection = b"-ERR Protocol error: unauthenticated bulk length\r\n";
        assert!(ends_with_rejected_header(&[b"+RESET\r\n", &rejection[..]].concat()));
        assert!(!ends_with_rejected_header(&[&rejection[..], b"+OK\r\n"].concat()));
        assert!(!ends_with_rejected_header(b"-NOAUTH Authentication required.\r\n"));
    }

    #[test]
    fn recognises_a_silent_quit_by_its_flag() {
        assert!(has_silent_quit(b"$40\r\nid=3 flags=Uc db=0\nid=4 flags=N db=0\n\r\n"));
        assert!(!has_silent_quit(b"$40\r\nid=3 name=c flags=N cmd=client\n\r\n"));
    }
}
