"""Parameter servers: variables live on some ranks, and the others read and change them at any time.

cluster          one rank's part, and which rank is a worker, which one a server
client           the requests of a worker; `messages/` carries them, unless the rank is alone
server           the loop that answers; `membership` knows who is lost, and what workers wait for each other for
transfers        how the server sends variables, and takes in their changes, in steps
store, rules     the variables on a server, and how they change
placement        on which server a variable lives; `partitioners` cut it into shards
variable         what a program holds, whole or in shards
"""
