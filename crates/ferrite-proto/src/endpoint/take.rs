//! How an endpoint handles a received message, depending on its role.

use super::outbox::FEATURES_WAITING;
use super::{Endpoint, ProtocolError, Role};
use crate::message::Message;

impl Endpoint {
    pub(super) fn apply(&mut self, message: Message) -> Result<(), ProtocolError> {
        match (message, self.role) {
            (Message::GetServerFeature { select, .. }, Role::Server) => {
                self.stats.features_received += 1;
                let answer = Message::GetServerFeature { select, features: self.config.features };
                if !self.outbox.queue_feature(answer) {
                    return Err(ProtocolError::TooManyFeatureRequests {
                        requests: FEATURES_WAITING + 1,
                    });
                }
            }
            // An endpoint never asks for features as a client, because none are defined.
            (Message::GetServerFeature { .. }, Role::Client) => {
                return Err(ProtocolError::UnrequestedFeatures);
            }
            // This message has no answer. It has no effect, because no feature is defined.
            (Message::SetClientFeature { .. }, _) => self.stats.features_received += 1,
            (Message::Keepalive, _) => self.stats.keepalives_received += 1,
            (Message::RegisterXferMemory(registration), _) => {
                self.send.register(registration)?;
                self.stats.registrations_received += 1;
            }
        }
        Ok(())
    }
}
