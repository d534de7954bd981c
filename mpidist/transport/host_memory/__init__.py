"""Host memory that is kept from call to call, as new pages of the system take longer than to reduce what they hold."""
