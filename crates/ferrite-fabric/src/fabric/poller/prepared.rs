//! Queue pairs that are created before links need them, because creating one takes the kernel and
//! the device longer than the rest of a handshake.

use std::sync::Arc;

use super::Poller;
use crate::device::device_objects::QueuePairBuilder;
use crate::device::shared_device::SharedDevice;
use crate::fabric::Shared;

impl Poller {
    /// Creates the prepared queue pairs of a device that are missing, one at a time. Each creation
    /// runs as a command, and links do not wait for it.
    pub(crate) fn prepare_queue_pairs(&mut self, shared: &Shared, device: &Arc<SharedDevice>) {
        let Some(objects) = self.device_objects[device.index].as_mut() else { return };
        let is_full = objects.prepared.len() >= shared.config.prepared_queue_pairs;
        if is_full || objects.is_preparing || device.is_gone() {
            return;
        }
        (objects.under_way, objects.is_preparing) = (objects.under_way + 1, true);
        let builder = objects.new_queue_pair(device, &shared.config);
        let device = Arc::clone(device);
        let work = |builder: &mut Option<_>| match builder.take() {
            Some(builder) => QueuePairBuilder::build(builder).map(Some),
            None => Ok(None),
        };
        self.command(shared, None, Some(builder), work, move |poller, shared, _, made| {
            let is_made = made.is_ok();
            if let Some(objects) = &mut poller.device_objects[device.index] {
                objects.is_preparing = false;
                if let Ok(Some(made)) = made {
                    objects.prepared.push(made.qp);
                }
            }
            poller.end_queue_pair(shared, &device);
            if is_made {
                poller.prepare_queue_pairs(shared, &device); // the next one that is missing
            }
        });
    }
}
