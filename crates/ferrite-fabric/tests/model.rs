//! All operations on buffers in random order, checked against a model that keeps its own accounts.

use std::collections::BTreeMap;

use bytes::Bytes;
use ferrite_fabric::mem::{Account, Buf, BufMut, Exposed, Pool, PoolError, Purpose, SizeClass};
use ferrite_verbs::Access;
use ferrite_verbs::fake::World;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::{MIB, small};

#[derive(Debug, Clone, Copy)]
enum Step {
    Take { len: usize, purpose: Purpose, account: Option<usize> },
    Fill(usize, u8),
    Freeze(usize),
    Clone(usize),
    Slice(usize, usize, usize),
    Thaw(usize),
    IntoBytes(usize),
    Charge(usize, usize),
    Expose(usize),
    Write(usize, u8),
    Revoke(usize),
    Drop(usize),
    DropElsewhere(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let len = prop_oneof![
        8 => 0..9000_usize,
        2 => 9000..70_000_usize,
        1 => 70_000..=2 * MIB,
    ];
    let purpose = prop_oneof![Just(Purpose::Send), Just(Purpose::Receive)];
    let account = proptest::option::of(0..ACCOUNTS.len());
    let at = any::<usize>();
    let step = prop_oneof![
        6 => (len, purpose, account)
            .prop_map(|(len, purpose, account)| Step::Take { len, purpose, account }),
        3 => (at, any::<u8>()).prop_map(|(at, byte)| Step::Fill(at, byte)),
        2 => at.prop_map(Step::Freeze),
        2 => at.prop_map(Step::Clone),
        2 => (at, any::<usize>(), any::<usize>())
            .prop_map(|(at, from, to)| Step::Slice(at, from, to)),
        2 => at.prop_map(Step::Thaw),
        1 => at.prop_map(Step::IntoBytes),
        1 => (at, 0..ACCOUNTS.len()).prop_map(|(at, account)| Step::Charge(at, account)),
        2 => at.prop_map(Step::Expose),
        1 => (at, any::<u8>()).prop_map(|(at, byte)| Step::Write(at, byte)),
        2 => at.prop_map(Step::Revoke),
        3 => at.prop_map(Step::Drop),
        1 => at.prop_map(Step::DropElsewhere),
    ];
    vec(step, 1..120)
}

const ACCOUNTS: [u64; 2] = [64 << 10, 4 << 20];

/// A handle, the block that it refers to, and the bytes that a read through it must return.
struct Item {
    handle: Handle,
    block: usize,
    bytes: Vec<u8>,
}

enum Handle {
    Unique(BufMut),
    Shared(Buf),
    Bytes(Bytes),
    Exposed(Exposed),
}

/// What the model knows of a block in use.
struct Block {
    class: SizeClass,
    purpose: Purpose,
    account: Option<usize>,
    handles: usize,
}

struct Model {
    pool: Pool,
    accounts: [Account; 2],
    items: Vec<Item>,
    blocks: BTreeMap<usize, Block>,
    next_block: usize,
}

impl Model {
    fn new(world: &World) -> Self {
        let pool = small(world).thread_cache_blocks(8).build().expect("pool");
        let accounts = ACCOUNTS.map(|limit| Account::new(format!("of {limit}"), limit));
        Self { pool, accounts, items: Vec::new(), blocks: BTreeMap::new(), next_block: 0 }
    }

    fn run(&mut self, step: Step) {
        match step {
            Step::Take { len, purpose, account } => self.take(len, purpose, account),
            Step::Fill(at, byte) => self.change(at, |mut item| {
                if let Handle::Unique(buf) = &mut item.handle {
                    buf.fill(byte);
                    item.bytes.fill(byte);
                }
                item
            }),
            Step::Freeze(at) => self.change(at, |item| match item.handle {
                Handle::Unique(buf) => Item { handle: Handle::Shared(buf.freeze()), ..item },
                handle => Item { handle, ..item },
            }),
            Step::Clone(at) => self.slice(at, 0, usize::MAX),
            Step::Slice(at, from, to) => self.slice(at, from, to),
            Step::Thaw(at) => self.thaw(at),
            Step::IntoBytes(at) => self.change(at, |item| match item.handle {
                Handle::Shared(buf) => Item { handle: Handle::Bytes(buf.into()), ..item },
                handle => Item { handle, ..item },
            }),
            Step::Charge(at, account) => self.charge(at, account),
            Step::Expose(at) => {
                let pool = self.pool.clone();
                self.change(at, |item| match item.handle {
                    Handle::Unique(buf) if !buf.is_empty() => {
                        let exposed = pool.expose(buf, 0, Access::REMOTE_WRITE).expect("exposed");
                        Item { handle: Handle::Exposed(exposed), ..item }
                    }
                    handle => Item { handle, ..item },
                });
            }
            Step::Write(at, byte) => self.change(at, |mut item| {
                if let Handle::Exposed(exposed) = &mut item.handle {
                    exposed.write(0, &[byte]);
                    item.bytes[0] = byte;
                }
                item
            }),
            Step::Revoke(at) => self.change(at, |item| match item.handle {
                Handle::Exposed(exposed) => {
                    Item { handle: Handle::Unique(exposed.revoke().expect("revoked")), ..item }
                }
                handle => Item { handle, ..item },
            }),
            Step::Drop(at) => drop(self.remove(at)),
            Step::DropElsewhere(at) => {
                let item = self.remove(at);
                std::thread::spawn(move || drop(item)).join().expect("the thread did not panic");
            }
        }
    }

    fn take(&mut self, len: usize, purpose: Purpose, account: Option<usize>) {
        let class = SizeClass::holding(len).expect("within the largest class");
        let result = match account {
            Some(at) => self.pool.take(len, purpose, &self.accounts[at]),
            None => self.pool.take_uncharged(len, purpose),
        };
        match result {
            Ok(mut buf) => {
                assert_eq!(
                    (buf.len(), buf.capacity(), buf.purpose()),
                    (len, class.bytes(), purpose)
                );
                buf.fill(len as u8);
                let block = self.next_block;
                self.next_block += 1;
                self.blocks.insert(block, Block { class, purpose, account, handles: 1 });
                self.items.push(Item {
                    handle: Handle::Unique(buf),
                    block,
                    bytes: vec![len as u8; len],
                });
            }
            Err(PoolError::OverBudget { asked, limit, used, which }) => {
                assert_eq!(asked, class.bytes() as u64);
                if limit == 8 * MIB as u64 {
                    assert_eq!(
                        self.pool.stats().heap(purpose).mapped_bytes,
                        limit,
                        "{which} is exhausted although it could grow"
                    );
                } else {
                    assert!(used + asked > limit, "{which} has room: {used} + {asked} of {limit}");
                }
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Replaces the item that `at` selects, if there is one.
    fn change(&mut self, at: usize, change: impl FnOnce(Item) -> Item) {
        if !self.items.is_empty() {
            let at = at % self.items.len();
            let item = change(self.items.swap_remove(at));
            self.items.push(item);
        }
    }

    fn slice(&mut self, at: usize, from: usize, to: usize) {
        let Some(at) = at.checked_rem(self.items.len()) else { return };
        let Item { handle: Handle::Shared(buf), block, bytes } = &self.items[at] else { return };
        let (from, to) = (from % (bytes.len() + 1), to.min(bytes.len()));
        let range = from.min(to)..from.max(to);
        let handle = Handle::Shared(buf.slice(range.clone()));
        let item = Item { handle, block: *block, bytes: bytes[range].to_vec() };
        self.blocks.get_mut(block).expect("block is in use").handles += 1;
        self.items.push(item);
    }

    fn thaw(&mut self, at: usize) {
        let Some(at) = at.checked_rem(self.items.len()) else { return };
        let alone = self.blocks[&self.items[at].block].handles == 1;
        self.change(at, |item| match item.handle {
            Handle::Shared(buf) => match buf.try_into_mut() {
                Ok(buf) => {
                    assert!(alone, "the buffer became mutable, although it has other readers");
                    Item { handle: Handle::Unique(buf), ..item }
                }
                Err(buf) => {
                    assert!(!alone, "the buffer has no other reader, but stays shared");
                    Item { handle: Handle::Shared(buf), ..item }
                }
            },
            handle => Item { handle, ..item },
        });
    }

    fn charge(&mut self, at: usize, account: usize) {
        let Some(at) = at.checked_rem(self.items.len()) else { return };
        let Item { handle: Handle::Unique(buf), block, .. } = &mut self.items[at] else { return };
        if buf.charge_to(&self.accounts[account]).is_ok() {
            self.blocks.get_mut(block).expect("block is in use").account = Some(account);
        }
    }

    fn remove(&mut self, at: usize) -> Option<Handle> {
        let at = at.checked_rem(self.items.len())?;
        let item = self.items.swap_remove(at);
        let block = self.blocks.get_mut(&item.block).expect("block is in use");
        block.handles -= 1;
        if block.handles == 0 {
            self.blocks.remove(&item.block);
        }
        Some(item.handle)
    }

    /// Checks the contents of all buffers, that no two blocks overlap, and that the pool's
    /// statistics and accounts match the model.
    fn check(&mut self) {
        let mut spans = Vec::new();
        let mut exposed_bytes = 0;
        for Item { handle, block, bytes } in &mut self.items {
            let addr = match handle {
                Handle::Unique(buf) => {
                    assert_eq!(&buf[..], &bytes[..]);
                    buf.raw_parts(0).addr
                }
                Handle::Shared(buf) => {
                    assert_eq!(&buf[..], &bytes[..]);
                    buf.raw_parts(0).addr
                }
                Handle::Bytes(buf) => {
                    assert_eq!(&buf[..], &bytes[..]);
                    buf.as_ptr().addr() as u64
                }
                Handle::Exposed(exposed) => {
                    let mut copy = vec![0; exposed.len()];
                    exposed.read(0, &mut copy);
                    assert_eq!(&copy, bytes);
                    exposed_bytes += copy.len() as u64;
                    exposed.remote().addr
                }
            };
            if !bytes.is_empty() {
                spans.push((addr, addr + bytes.len() as u64, *block));
            }
        }
        spans.sort_unstable();
        for (at, (_, end, block)) in spans.iter().enumerate() {
            let overlapping = spans[at + 1..].iter().take_while(|(start, ..)| start < end);
            for (.., other) in overlapping {
                assert_eq!(block, other, "two blocks overlap");
            }
        }

        let stats = self.pool.stats();
        assert_eq!(stats.exposed_bytes, exposed_bytes);
        for purpose in Purpose::ALL {
            let heap = stats.heap(purpose);
            let out = self.blocks.values().filter(|block| block.purpose == purpose);
            let in_use: usize = out.map(|block| block.class.bytes()).sum();
            assert_eq!(heap.in_use_bytes, in_use as u64);
            assert_eq!(heap.mapped_bytes, heap.in_use_bytes + heap.cached_bytes + heap.free_bytes);
            assert!(heap.mapped_bytes <= heap.max_bytes);
        }
        for (at, account) in self.accounts.iter().enumerate() {
            let charged = self.blocks.values().filter(|block| block.account == Some(at));
            assert_eq!(
                account.used_bytes(),
                charged.map(|block| block.class.bytes() as u64).sum::<u64>()
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    #[cfg_attr(miri, ignore = "takes hours under Miri")]
    fn pool_agrees_with_the_model(steps in steps()) {
        let world = World::new();
        let mut model = Model::new(&world);
        for step in steps {
            model.run(step);
            model.check();
        }
        model.items.clear();
        model.blocks.clear();
        model.check();
        drop(model);
        let left = world.objects();
        prop_assert_eq!((left.memory_regions, left.protection_domains), (0, 0));
    }
}
