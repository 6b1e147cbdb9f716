//! The faults of a world: one after the other, some of which end by themselves later.

use super::node::{Life, name};
use super::{LEASE, World, lock};
use crate::random::Random;
use format::NodeId;
use ipc::{Host, Time};
use pmem::Recorder;
use pmem::crash::lose_power;
use std::sync::Arc;
use std::time::Duration;

/// Something that is to end.
enum Lasting {
    /// A direction between two nodes is cut.
    Cut(String, String),
    /// It is slow.
    Slow(String, String),
    /// The manager and a node do not hear each other.
    Unheard(NodeId),
    /// The manager does not run.
    NoManager,
}

/// The faults of a run.
pub struct Faults {
    left: u32,
    next: Time,
    lasting: Vec<(Time, Lasting)>,
}

/// A time in milliseconds below a bound.
fn some_ms(random: &mut Random, bound: Duration) -> Duration {
    Duration::from_micros(1 + random.below(bound.as_micros() as u64))
}

impl Faults {
    /// So many, the first one when the nodes have had the time to begin.
    pub fn new(count: u32) -> Self {
        Self { left: count, next: Time::from_ns(1_300_000_000), lasting: Vec::new() }
    }

    /// Nothing goes wrong any more.
    pub fn are_over(&self) -> bool {
        self.left == 0 && self.lasting.is_empty()
    }

    /// Does what is due.
    pub fn step(&mut self, world: &Arc<World>, random: &mut Random) {
        let now = world.host.now();
        while let Some(at) = self.lasting.iter().position(|(until, _)| *until <= now) {
            let (_, lasting) = self.lasting.swap_remove(at);
            end(world, lasting);
        }
        if self.left > 0 && self.next <= now {
            self.left -= 1;
            // Many come while the one before is not dealt with.
            let bound = if random.below(3) == 0 { LEASE / 4 } else { LEASE * 3 };
            self.next = now.after(some_ms(random, bound));
            self.one(world, random, now);
        }
    }

    /// Ends what lasts.
    pub fn heal(&mut self, world: &Arc<World>) {
        self.left = 0;
        self.lasting.drain(..).for_each(|(_, lasting)| end(world, lasting));
    }

    fn one(&mut self, world: &Arc<World>, random: &mut Random, now: Time) {
        let nodes: Vec<NodeId> = world.nodes().collect();
        let node = nodes[random.below(nodes.len() as u64) as usize];
        let other = nodes[random.below(nodes.len() as u64) as usize];
        let kind = random.below(12);
        if kind > 4 {
            lock(&world.counts).others += 1;
        }
        let span = some_ms(random, LEASE * 3);
        match kind {
            0..=4 => {
                // The node that leads, more often than not.
                let head = world.manager.view().subtrees.values().find_map(|subtree| subtree.manager);
                let node = if kind > 1 { head.unwrap_or(node) } else { node };
                kill(world, random, node, now);
            }
            5 | 6 if node != other => {
                let ways = match random.below(3) {
                    0 => vec![(node, other)],
                    _ => vec![(node, other), (other, node)],
                };
                for (from, to) in ways {
                    world.network.cut(&name(from), &name(to));
                    self.lasting.push((now.after(span), Lasting::Cut(name(from), name(to))));
                }
            }
            7 if node != other => {
                let (from, to) = (name(node), name(other));
                world.network.delay(&from, &to, Duration::ZERO, some_ms(random, LEASE / 8));
                self.lasting.push((now.after(span), Lasting::Slow(from, to)));
            }
            8 if node != other => world.network.disconnect(&name(node), &name(other)),
            9 | 10 => {
                let ways = [(true, false), (false, true), (true, true)][random.below(3) as usize];
                world.manager.cut(node, ways);
                self.lasting.push((now.after(span), Lasting::Unheard(node)));
            }
            11 => {
                world.manager.die();
                self.lasting.push((now.after(some_ms(random, LEASE * 2)), Lasting::NoManager));
            }
            _ => {}
        }
    }
}

fn kill(world: &Arc<World>, random: &mut Random, node: NodeId, now: Time) {
    let index = world.nodes().position(|other| other == node).expect("it is one of these");
    let life: Option<Arc<Life>> = lock(&world.nodes)[index].life.clone();
    let Some(life) = life else { return };
    let has_power = random.below(3) == 0;
    let pause = if has_power { LEASE / 2 } else { LEASE * 4 };
    let (again, seed) = (now.after(some_ms(random, pause)), random.bits());
    life.host.kill();
    lock(&world.counts).power_cuts += u64::from(!has_power);
    if !has_power {
        world.set_torn(node, true);
    }
    let model = world.model;
    let left = |recorder: &Recorder| match has_power {
        true => recorder.after_kill(),
        false => Recorder::of_image(lose_power(recorder, model, seed)),
    };
    world.bury(index, left, again);
}

fn end(world: &World, lasting: Lasting) {
    match lasting {
        Lasting::Cut(from, to) => world.network.heal(&from, &to),
        Lasting::Slow(from, to) => world.network.delay(&from, &to, Duration::ZERO, Duration::ZERO),
        Lasting::Unheard(node) => world.manager.cut(node, (false, false)),
        Lasting::NoManager => world.manager.start(),
    }
}
