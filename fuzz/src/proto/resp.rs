//! Commands and replies in pieces. Their ends must not depend on the pieces, and complete ones must
//! be parsed.
//!
//! ```text
//!   first byte   a seed for the lengths of the pieces
//!   the rest     bytes from a peer
//! ```

use std::fmt::Debug;

use ferrite_proto::resp::{
    Command, CommandError, CommandFramer, Limits, Progress, ReplyError, ReplyFramer, Value,
    encode_command,
};

/// Limits that are small enough for inputs to reach them.
const LIMITS: Limits = Limits {
    bulk_bytes: 300,
    multibulk_args: 20,
    exact_ends: false,
    inline_bytes: 100,
    elements: 30,
    depth: 5,
    reply_bytes: 2000,
    reply_values: 60,
};

/// Checks that a complete command has as many arguments as it announces, and that they survive
/// re-encoding.
pub fn resp_command(bytes: &[u8]) {
    let Some((seed, bytes)) = bytes.split_first() else { return };
    let mut framer = CommandFramer::new(LIMITS);
    let (ends, error) = frames(bytes, usize::MAX, |piece| framer.feed(piece));
    let mut in_pieces = CommandFramer::new(LIMITS);
    assert_eq!(frames(bytes, (*seed).into(), |piece| in_pieces.feed(piece)), (ends.clone(), error));
    let mut from = 0;
    for end in ends {
        let frame = &bytes[from..end];
        from = end;
        let command = Command::parse_within(frame, LIMITS).expect("complete command");
        assert_eq!(
            Command::parse_within(&frame[..frame.len() - 1], LIMITS),
            Err(CommandError::Incomplete)
        );
        let more = [frame, b"\n"].concat();
        assert_eq!(Command::parse_within(&more, LIMITS), Err(CommandError::Trailing));
        if let Some(line) = command.inline() {
            assert!(line.len() <= LIMITS.inline_bytes as usize && !line.contains(&b'\n'));
            assert!(
                frame.starts_with(line)
                    && frame.len() - line.len() <= 2
                    && command.args().len() == 0
            );
            continue;
        }
        let args: Vec<_> = command.args().collect();
        assert_eq!(args.len(), command.args().len());
        assert!(args.len() <= LIMITS.multibulk_args as usize);
        assert!(args.iter().all(|arg| arg.len() <= LIMITS.bulk_bytes as usize));
        let mut again = Vec::new();
        encode_command(args.iter(), &mut again);
        assert!(args.is_empty() || again.len() == frame.len());
        assert!(Command::parse(&again).expect("our own encoding").args().eq(args));
    }
    assert!(error.is_some() || framer.is_inside() == (from < bytes.len()));
    assert!(error.is_some() || framer.frame_bytes() == (bytes.len() - from) as u64);
    assert!(error.is_none_or(|error| error.to_string().starts_with("Protocol error: ")));
}

/// Checks that a complete reply can be parsed, and survives re-encoding.
pub fn resp_reply(bytes: &[u8]) {
    let Some((seed, bytes)) = bytes.split_first() else { return };
    let mut framer = ReplyFramer::new(LIMITS);
    let (ends, error) = frames(bytes, usize::MAX, |piece| framer.feed(piece));
    let mut in_pieces = ReplyFramer::new(LIMITS);
    assert_eq!(frames(bytes, (*seed).into(), |piece| in_pieces.feed(piece)), (ends.clone(), error));
    let mut from = 0;
    for end in ends {
        let frame = &bytes[from..end];
        from = end;
        assert_eq!(
            Value::parse_within(&frame[..frame.len() - 1], LIMITS),
            Err(ReplyError::Incomplete)
        );
        let more = [frame, b"_"].concat();
        assert_eq!(Value::parse_within(&more, LIMITS), Err(ReplyError::Trailing));
        match Value::parse_within(frame, LIMITS) {
            Ok(value) => {
                let mut again = Vec::new();
                value.encode(&mut again);
                let mut and_again = Vec::new();
                Value::parse(&again).expect("our own encoding").encode(&mut and_again);
                // Compares encodings and not values, because a double may be NaN.
                assert_eq!(again, and_again);
            }
            // The framer checks everything except doubles.
            Err(error) => assert_eq!(error, ReplyError::Double),
        }
    }
    assert!(error.is_some() || framer.is_inside() == (from < bytes.len()));
    assert!(error.is_some() || framer.frame_bytes() == (bytes.len() - from) as u64);
    assert!(error.is_none_or(|error| error.to_string().starts_with("Protocol error")));
}

/// Feeds all bytes in pieces. Returns where frames end, and the error that stopped the framer.
fn frames<E: Debug + Copy + PartialEq>(
    bytes: &[u8],
    seed: usize,
    mut feed: impl FnMut(&[u8]) -> Result<Progress, E>,
) -> (Vec<usize>, Option<E>) {
    let (mut ends, mut at, mut size) = (Vec::new(), 0, seed);
    while at < bytes.len() {
        size = if seed == usize::MAX { seed } else { (size * 37 + 11) % 41 };
        let piece = &bytes[at..bytes.len().min(at.saturating_add(size))];
        match feed(piece) {
            Ok(Progress { consumed, complete }) => {
                assert!(consumed <= piece.len() && (complete || consumed == piece.len()));
                assert!(!complete || consumed > 0);
                at += consumed;
                if complete {
                    ends.push(at);
                }
            }
            Err(error) => {
                assert_eq!(feed(b"+OK\r\n"), Err(error), "an error is final");
                return (ends, Some(error));
            }
        }
    }
    (ends, None)
}
